"""Fine-tuning a checkpoint on text: one loop, from a settings file to a normal checkpoint folder.

    transformer2 train CONFIG.yaml [section.key=value ...]
    accelerate launch -m transformer2.training.finetune CONFIG.yaml [section.key=value ...]
    torchrun --nproc_per_node 2 -m transformer2.training.finetune CONFIG.yaml ...      (several processes on a CPU)

The loss of an optimiser step is the sum over its target tokens divided by their number, once, over all
micro-batches and processes: how a step is cut up changes nothing. `training.loop` has the loop itself.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from transformer2.conversion.files import write_json
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.conversion.publishing import PartialFolder, partial_folder, publish
from transformer2.conversion.trained import trained_everything, training_report
from transformer2.training import precision, resuming, throughput
from transformer2.training.arms import is_comparison
from transformer2.training.bypass import check_has_original
from transformer2.training.isolation import check_isolation
from transformer2.training.launching import deterministic, enable_checkpointing, start
from transformer2.training.loading import find_checkpoint, load_model, load_tokenizer, stored_dtypes
from transformer2.training.loop import Loop
from transformer2.training.lora import BASE_FILE, FOLDER, save_adapter
from transformer2.training.parameters import named_parameters
from transformer2.training.progress import Progress
from transformer2.training.rows import load_rows
from transformer2.training.run_report import build_report, shareable
from transformer2.training.saving import check_frozen, check_output, write_checkpoint
from transformer2.training.settings import Settings, check, load_settings
from transformer2.training.stages import stages
from transformer2.training.state import Counters
from transformer2.training.stopping import Stopping
from transformer2.training.tracking import check_trackers, start_trackers


@plain_os_errors()
def train(config: Settings | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Run the training that `config` describes (settings, a mapping of their shape, or a YAML file).

    Writes the checkpoint folder `output` and returns its training_report.json: loss, gradient norm and learning rates
    of every step, held-out perplexity, tokens, seconds, tokens per second, parameters, warnings. Goes on from the
    newest checkpoint of the same run in the folder OUTPUT-run, where there is one.
    Settings that ask for a control run, nulls, variants, seeds or random weights give a comparison, see
    `training.comparison`.
    Raises UserError for bad input, CheckFailed where a loss or gradient is not finite or a frozen tensor changed, and
    Preempted after SIGTERM, when its state is saved; no output is written then.
    """
    settings = config if isinstance(config, Settings) else load_settings(config)
    check(settings)
    if is_comparison(settings):
        from transformer2.training.comparison import compare

        return compare(settings)
    source, output = find_checkpoint(settings.model), Path(os.path.abspath(user_path(settings.output)))
    check_output(output, source, settings.overwrite)
    check_trackers(settings.tracking)
    accelerator, chosen = start(settings.optimisation)
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic(settings.optimisation.deterministic))
        partial = None
        if accelerator.is_main_process:
            stack.enter_context(plain_os_errors(output.parent))
            partial = stack.enter_context(partial_folder(output, overwrite=settings.overwrite))
            stack.callback(resuming.clear_up, resuming.run_folder(output), succeeded=False)
        return run(settings, accelerator, chosen, source, output, partial)


def run(
    settings: Settings,
    accelerator: Accelerator,
    chosen: str,
    source: Path,
    output: Path,
    partial: PartialFolder | None,
) -> dict[str, Any]:
    """The run itself, in the precision `chosen`. The main process builds `output` in `partial`, the others have none.

    `partial` is there before the first step, so that no other run takes the name while this one computes.
    """
    plan, dtypes, folder = stages(settings), stored_dtypes(source), resuming.run_folder(output)
    tokenizer = load_tokenizer(source)
    with accelerator.main_process_first():  # the others find what it has downloaded or converted
        rows, held_out = load_rows(settings, tokenizer)
    trained = {stage.optimisation.train for stage in plan}
    dtype = precision.load_dtype(chosen, "all" if "all" in trained else "new", set(dtypes.values()))

    def build():
        model = load_model(source, dtype)
        rows.check_vocabulary(model.config.vocab_size)
        if settings.loss.kl:
            check_has_original(model, "all" in trained)
        if settings.optimisation.gradient_checkpointing:
            enable_checkpointing(model)
        return model

    about = resuming.identity(settings, source, rows, chosen)
    checkpoint = agreed_checkpoint(settings, accelerator, folder)
    if checkpoint is not None:
        resuming.check_same_run(checkpoint, about)
    with Stopping(accelerator) as stopping:
        loop = Loop(settings, plan, accelerator, build, rows, held_out, folder, about)
        loop.say = lambda sentence: accelerator.print(sentence, file=sys.stderr)
        loop.begin(checkpoint)
        check_isolation(loop.network, rows.sample(), accelerator.device)
        peak = throughput.peak_flops(accelerator, settings.tracking.peak_tflops)
        if checkpoint is not None:
            loop.say(f"Going on from step {loop.counters.step}, {checkpoint}.")
        run_id = about["model"][:8] + output.name
        log = folder / resuming.LOG
        start_trackers(accelerator, settings.tracking, output, log, shareable(settings), run_id, loop.counters.step)

        def mfu(counters: Counters) -> float | None:
            return throughput.utilisation(counters.flops / counters.seconds, peak, accelerator.num_processes)

        def tell(counters: Counters) -> None:
            tokens_per_second, used = counters.tokens / counters.seconds, mfu(counters)
            taken = counters.history[-1] if counters.history and counters.history[-1]["step"] == counters.step else {}
            values = {"loss": taken.get("loss"), "gradient_norm": taken.get("gradient_norm"), "mfu": used}
            values |= {f"learning_rate/{name}": rate for name, rate in taken.get("learning_rates", {}).items()}
            values |= {"tokens": counters.tokens, "tokens_per_second": tokens_per_second}
            accelerator.log({name: value for name, value in values.items() if value is not None}, step=counters.step)
            progress.step(taken.get("loss"), tokens_per_second, used)

        def tell_evaluation(scores: dict[str, Any]) -> None:
            step = scores["step"]
            values = {f"held_out/{name}": value for name, value in scores.items() if name != "step"}
            accelerator.log({name: value for name, value in values.items() if value is not None}, step=step)

        loop.on_step, loop.on_evaluation = tell, tell_evaluation
        total = sum(stage.optimisation.steps for stage in plan)
        with Progress(total, shown=accelerator.is_main_process, done=loop.counters.step) as progress:
            loop.say = progress.say
            loop.run(stopping)
        for tracker in accelerator.trackers:  # accelerator.end_training() would take the other processes away, too
            tracker.finish()

    model, peft = loop.final_model()
    facts = {
        "precision": chosen,
        "processes": accelerator.num_processes,
        "parameters": loop.parameter_counts,
        "pretrained_changed": trained != {"new"} or trained_everything(training_report(source) or {}),
        "rows": rows.count,
        "resumed": checkpoint is not None,
    }
    report = build_report(settings, plan, loop.counters, model.config, facts, mfu(loop.counters))
    if partial is not None:
        if peft is not None:
            save_adapter(peft, partial.path / FOLDER, base_name(settings))
            write_json(partial.path / FOLDER / BASE_FILE, {"model_digest": about["model"]})
            model = peft.merge_and_unload()
        names = {name for name, _ in named_parameters(model)}
        changed = set(loop.counters.trained) | {
            n for n in names if f"{n.removesuffix('weight')}lora_A.default.weight" in loop.counters.trained
        }
        write_checkpoint(model, partial.path, source, dtypes)
        if settings.data.chat_template:
            (partial.path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
        check_frozen(partial.path, source, sorted(names - changed))
        write_json(partial.path / "training_report.json", report)
        resuming.take_log(folder, partial.path)
        publish(partial, output)
        resuming.clear_up(folder, succeeded=True)
    accelerator.wait_for_everyone()
    return report


def agreed_checkpoint(settings: Settings, accelerator: Accelerator, folder: Path) -> Path | None:
    """The checkpoint to go on from, looked for by the main process on behalf of all."""
    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer = [resuming.find_resumable(settings, folder)]
        except Exception as error:  # the others must not wait for an answer
            answer = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def base_name(settings: Settings) -> str:
    """What an adapter calls the model that it is for: its name on the hub, or that of its folder."""
    return Path(settings.model).name if Path(settings.model).exists() else str(settings.model)


if __name__ == "__main__":  # the same command line as `transformer2 train`, for `accelerate launch -m`
    from transformer2_cli import main

    sys.argv.insert(1, "train")
    main()
