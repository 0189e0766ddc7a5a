"""Commands that write text: generate and chat. The text goes to stdout, everything else to stderr."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .conversion import print_json

Model = Annotated[str, typer.Argument(help="Checkpoint folder or hub name.", metavar="PATH")]
MaxNewTokens = Annotated[int, typer.Option(help="How many tokens at most.")]
DoSample = Annotated[bool | None, typer.Option(help="Sample, or always take the likeliest token.")]
Temperature = Annotated[float | None, typer.Option(help="Above 1: more variety; below: less. Samples.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this share.")]
TopK = Annotated[int | None, typer.Option(help="Sample from so many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="Of the sampling.")]
System = Annotated[str | None, typer.Option(help="System prompt of a chat.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Attention = Annotated[
    str | None,
    typer.Option("--attn", help="eager, sdpa, flex_attention, flash_attention_2 or flash_attention_3."),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Decode through torch.compile, with a static cache; starts slowly.")
]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("generate")(generate)
    app.command("chat")(chat)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat to answer; - reads it from stdin.")],
    max_new_tokens: MaxNewTokens = 200,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat format.")] = False,
    system: System = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention: Attention = None,
    compiled: Compiled = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt, text and speed as JSON, at the end.")] = False,
) -> None:
    """Continue a prompt, printing each token as it is made."""
    from transformer2.conversion.paths import plain_os_errors
    from transformer2.training.generation import Conversation, Generator, check_options

    check_options(max_new_tokens, temperature, top_p, top_k, seed)
    if system is not None and not chat:
        raise typer.BadParameter("is for chats: add --chat.", param_hint="--system")
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")  # which `echo` adds
    with plain_os_errors():
        generator = Generator(model, dtype=dtype, device=device, attention=attention, compiled=compiled)
        options: dict[str, Any] = {
            "file": None if as_json else sys.stdout,
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
        }
        if chat:
            made = Conversation(generator, system).say(prompt, **options)
        else:
            made = generator.write(generator.encode(prompt), **options)
    if as_json:
        print_json({"prompt": prompt, **made.as_dict()})
    else:
        print(speed(made), file=sys.stderr)


def chat(
    model: Model,
    system: System = None,
    max_new_tokens: MaxNewTokens = 500,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention: Attention = None,
    compiled: Compiled = False,
) -> None:
    """Talk to a model in its chat format: one line a message, /clear starts anew, /exit or Ctrl-D ends."""
    from transformer2.conversion.paths import plain_os_errors
    from transformer2.errors import UserError
    from transformer2.training.generation import Conversation, Generator, check_options

    check_options(max_new_tokens, temperature, top_p, top_k, seed)
    with plain_os_errors():
        generator = Generator(model, dtype=dtype, device=device, attention=attention, compiled=compiled)
        generator.encode_chat([{"role": "user", "content": "Hello"}])  # a model without a chat format is told at once
        conversation = Conversation(generator, system)
        options = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature}
        options |= {"top_p": top_p, "top_k": top_k}
        for line in messages():
            if line == "/clear":
                conversation.messages.clear()
                print("(a new conversation)", file=sys.stderr)
                continue
            try:
                made = conversation.say(line, file=sys.stdout, seed=seed, **options)
            except UserError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"Error: {error} /clear starts anew.", file=sys.stderr)
                continue
            seed = None  # of the whole conversation, not of every answer
            print(speed(made), file=sys.stderr)


def messages() -> Iterator[str]:
    """The user's lines, empty ones left out, until /exit or the end; a terminal gets a prompt and can edit them."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  editing and history for input()
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def speed(made: Any) -> str:
    """A sentence about a `Generated`."""
    counted = f"{made.new_tokens} token{'s' if made.new_tokens != 1 else ''} in {made.seconds:.1f} s"
    first = f"the first after {made.first_token_seconds:.2f} s"
    if made.tokens_per_second is None:
        return f"[{counted}]"
    return f"[{counted}: {first}, then {made.tokens_per_second:.1f} tokens/s]"
