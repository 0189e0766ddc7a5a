"""The loop of a training run: stages, steps, evaluations and checkpoints, each a function of the counters.

Whatever comes next follows from `Counters`, the tensors and the settings alone, so a run that is taken up from a
checkpoint, at whatever point between two steps, goes on as if nothing had happened.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from transformer2.errors import CheckFailed, UserError
from transformer2.training import checkpoints, parameters, precision, schedule, state
from transformer2.training.lora import add_adapters
from transformer2.training.resuming import prune_best
from transformer2.training.run_report import stage_summary
from transformer2.training.settings import Settings
from transformer2.training.sharding import check_sharded, is_deepspeed, is_sharding
from transformer2.training.stages import Stage
from transformer2.training.state import Counters
from transformer2.training.step import accumulate, check_finite, evaluate_held_out, save_bad_rows
from transformer2.training.stopping import Preempted, Stopping
from transformer2.training.throughput import flops_per_token


class Loop:
    """A run in progress.

    build: makes the model that the run starts from, new each time. rows, held_out: what to train and evaluate on.
    folder: of checkpoints. about: what a checkpoint is of. on_step(counters), say(sentence): tell people.
    """

    def __init__(
        self,
        settings: Settings,
        stages: list[Stage],
        accelerator: Accelerator,
        build: Callable[[], nn.Module],
        rows: Any,
        held_out: Any,
        folder: Path,
        about: dict[str, Any],
    ):
        self.settings, self.stages, self.accelerator, self.build = settings, stages, accelerator, build
        self.rows, self.held_out, self.folder, self.about = rows, held_out, folder, about
        self.counters = Counters()
        self.model: nn.Module | None = None  # as it is called: wrapped by Accelerate
        self.peft = None  # its adapters, as PEFT sees them
        self.last_saved, self.saved_at = -1, time.monotonic()
        self.on_step: Callable[[Counters], None] = lambda counters: None
        self.on_evaluation: Callable[[dict[str, Any]], None] = lambda scores: None
        self.say: Callable[[str], None] = lambda sentence: None

    def begin(self, checkpoint: Path | None = None) -> None:
        """Start at the beginning, or where a checkpoint says."""
        if checkpoint is None:
            self._begin_stage({})
            return
        if is_deepspeed(self.accelerator):
            raise UserError("A run under DeepSpeed cannot be resumed; use FSDP2 (configs/accelerate/fsdp2.yaml).")
        self.counters, _ = state.load_counters(checkpoint)
        tensors, optimizer, generators = state.load_tensors(checkpoint)
        self._begin_stage(optimizer, tensors)
        self.last_saved = self.counters.step
        rank = self.accelerator.process_index
        if rank < len(generators):
            state.restore_random_state(generators[rank])
        else:
            self.say("More processes than before: dropout of the new ones starts from the seed.")

    def run(self, stopping: Stopping) -> None:
        """Go on to the end. Raises Preempted, with everything saved, where the processes were told to stop."""
        while True:
            stopped = self._evaluation_is_due() and not self._evaluate(lambda: stopping.agreed()[0])
            stop, save = stopping.agreed(self._checkpoint_is_due())
            if stop or stopped or save:
                self.save()
            if stop or stopped:
                raise Preempted(
                    f"Told to stop at step {self.counters.step}; the state is in {self.folder}, and the same command "
                    "goes on from there."
                )
            if not self._stage_is_over():
                self._step()
            elif not self._next_stage():
                return

    def save(self, name: str | None = None) -> None:
        """Write a checkpoint (all processes take part), and delete older ones."""
        if is_deepspeed(self.accelerator):
            raise UserError(
                "A run under DeepSpeed cannot be saved in between; use FSDP2, or leave `checkpoints` alone."
            )
        step, network = self.counters.step, self.network
        tensors = state.model_tensors(network, self.counters.trained)
        optimizer = state.optimizer_tensors(self.optimizer)
        generators = gather_object([state.random_state()])
        if self.accelerator.is_main_process:
            checkpoints.write_checkpoint(
                self.folder,
                name or f"step-{step:08d}",
                lambda path: state.save(path, self.counters, tensors, optimizer, generators, self.about),
            )
            if name is None:
                checkpoints.rotate(self.folder, self.settings.checkpoints.keep)
                prune_best(self.folder, self.counters.best["step"] if self.counters.best else -1)
        self.accelerator.wait_for_everyone()
        if name is None:
            self.last_saved, self.saved_at = step, time.monotonic()

    def final_model(self) -> tuple[nn.Module, Any]:
        """The trained model, whole and without wrappers, and PEFT's view of it where there are adapters.

        All processes take part; with sharding, only the main process's answer is a model.
        """
        best = self.counters.best
        if self.settings.evaluation.keep_best and best and best["step"] != self.counters.step:
            folder = self.folder / f"best-{best['step']:08d}"
            counters, _ = state.load_counters(folder)
            return self._rebuilt(counters, state.load_tensors(folder)[0])
        if is_deepspeed(self.accelerator):
            whole = self.accelerator.get_state_dict(self.model)
            return self._rebuilt(self.counters, {n: whole[n] for n in self.counters.trained if n in whole})
        if is_sharding(self.accelerator):
            return self._rebuilt(self.counters, state.model_tensors(self.network, self.counters.trained))
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False), self.peft

    @property
    def network(self) -> nn.Module:
        """The model without what Accelerate has wrapped it in."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def stage(self) -> Stage:
        """The stage that the run is in."""
        return self.stages[self.counters.stage]

    def _rebuilt(self, counters: Counters, tensors: state.Tensors) -> tuple[nn.Module, Any]:
        model, peft = self.build(), None
        if any(".lora_" in name for name in tensors):
            peft = add_adapters(model, self.stages[counters.stage].optimisation.lora)
        state.load_model_tensors(model, tensors)
        return model, peft

    def _begin_stage(self, optimizer: state.Tensors, tensors: state.Tensors | None = None) -> None:
        """Make model and optimiser ready for the stage of the counters.

        optimizer: what an optimiser knew, by name; parameters that it did not know start afresh. tensors: trained
        parameters to load into a new model.
        """
        optimisation, counters = self.stage.optimisation, self.counters
        if self.model is None or tensors is not None:
            model, self.peft = self.build(), None
        else:
            model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            self.model = self.optimizer = None
            self.accelerator.free_memory()
        if optimisation.train == "lora" and self.peft is None:
            self.peft = add_adapters(model, optimisation.lora)
        parameters.select(model, optimisation.train, optimisation.frozen)
        self._hold_annealed(model)
        precision.make_masters(model)
        if tensors is not None:
            state.load_model_tensors(model, tensors)
        model.train()
        self.groups = parameters.parameter_groups(
            model, dataclasses.asdict(optimisation.lr), optimisation.weight_decay, optimisation.groups
        )
        names = {name for name, parameter in parameters.named_parameters(model) if parameter.requires_grad}
        counters.trained = sorted(names | set(counters.trained) | set(counters.annealed or ()))
        self.parameter_counts = parameters.count_parameters(model)
        if len(self.stages) > 1:
            self.say(f"stage {stage_number(self)}: {self.stage.name}, {optimisation.steps} steps")
        self.say(parameters.table(model, self.groups))
        for group in self.groups:
            group["peak"] = group["lr"]
        built = torch.optim.AdamW(self.groups, betas=tuple(optimisation.betas))
        self.model, self.optimizer = self.accelerator.prepare(model, built)
        check_sharded(self.accelerator, self.network)
        state.load_optimizer_tensors(self.optimizer, optimizer)
        self.flops_per_token = flops_per_token(self.network, self.rows.sample(), self.accelerator.device)

    def _hold_annealed(self, model: nn.Module) -> None:
        """Parameters that a schedule moves, in this stage or one before, are not trained."""
        schedules = [stage.optimisation.anneal for stage in self.stages[: self.counters.stage + 1]]
        starts = {}
        for targets in schedules:
            for name, parameter in parameters.named_parameters(model):
                if name.rpartition(".")[2] in targets:
                    parameter.requires_grad_(False)
        for target in schedules[-1]:
            found = {n: p for n, p in parameters.named_parameters(model) if n.rpartition(".")[2] == target}
            if not found or any(parameter.numel() != 1 for parameter in found.values()):
                raise UserError(f"anneal: this model has no parameter {target!r} that is a single number.")
            starts |= {name: parameter.item() for name, parameter in found.items()}
        if self.counters.annealed is None:
            self.counters.annealed = starts

    def _move_annealed(self, progress: float) -> None:
        """progress: 0 leaves annealed parameters where the stage began, 1 puts them at their targets."""
        starts, targets = self.counters.annealed, self.stage.optimisation.anneal
        if not starts:
            return
        with torch.no_grad():
            for name, parameter in parameters.named_parameters(self.network):
                if name in starts:
                    start, target = starts[name], targets[name.rpartition(".")[2]]
                    parameter.fill_(target if progress == 1 else start + (target - start) * progress)

    def _step(self) -> None:
        counters, optimisation = self.counters, self.stage.optimisation
        began = time.perf_counter()
        self._move_annealed((counters.stage_step + 1) / optimisation.steps)
        factor = schedule.factor(
            counters.stage_step,
            optimisation.steps,
            optimisation.warmup,
            optimisation.min_lr_ratio,
            optimisation.schedule,
            optimisation.decay,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        rates = {group["label"]: group["lr"] for group in self.optimizer.param_groups}
        rows = self.rows.for_step(counters.step, optimisation.rows_per_step, optimisation.seed)
        loss = accumulate(self.accelerator, self.model, rows, optimisation.rows_per_batch, self.settings.loss)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = self.accelerator.clip_grad_norm_(trained, optimisation.clip or math.inf)
        norm = float(norm) if norm is not None else 0.0  # DeepSpeed clips by itself
        counters.step += 1
        counters.stage_step += 1
        if self._may_be_taken(loss, norm, rows):
            self.optimizer.step()
            counters.history.append(
                {"step": counters.step, "loss": loss, "gradient_norm": norm, "learning_rates": rates}
            )
        else:
            counters.skipped.append(counters.step)
        self.optimizer.zero_grad(set_to_none=True)
        counters.seconds += time.perf_counter() - began
        tokens = sum(len(row.input_ids) for row in rows)
        counters.tokens += tokens
        counters.flops += tokens * self.flops_per_token
        self.on_step(counters)

    def _may_be_taken(self, loss: float, norm: float, rows: list) -> bool:
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        step = self.counters.step
        file = self.folder / f"bad-rows-step-{step}.safetensors"
        if self.accelerator.is_main_process:
            save_bad_rows(file, rows)
        skipped = self.counters.skipped if self.settings.optimisation.on_nan == "skip" else None
        return check_finite(loss, norm, step, file, skipped)

    def _evaluation_is_due(self) -> bool:
        counters, every = self.counters, self.settings.evaluation.every
        if self.held_out is None or (counters.evaluations and counters.evaluations[-1]["step"] == counters.step):
            return False
        return counters.step == 0 or self._stage_is_over() or bool(every and counters.step % every == 0)

    def _evaluate(self, stop: Callable[[], bool]) -> bool:
        """False where it was stopped on the way; then nothing has changed."""
        counters, settings = self.counters, self.settings.evaluation
        scores = evaluate_held_out(
            self.accelerator, self.model, self.held_out, settings.rows_per_batch, stop, counters.step
        )
        if scores is None:
            return False
        counters.evaluations.append({"step": counters.step, **scores})
        self.on_evaluation(counters.evaluations[-1])
        self.say(f"step {counters.step}: held-out perplexity {scores['perplexity']:.3f}")
        if counters.best is None or scores["nll"] < counters.best["nll"]:
            counters.best = {"step": counters.step, "nll": scores["nll"]}
            if settings.keep_best:
                self.save(f"best-{counters.step:08d}")
        if counters.stage_best is None or scores["nll"] < counters.stage_best - settings.min_gain:
            counters.stage_best, counters.no_gain = scores["nll"], 0
        else:
            counters.no_gain += 1
        patient = settings.patience is None or counters.no_gain < settings.patience
        if not patient and not self.stage.optimisation.anneal and not self._stage_is_over():
            counters.ended = True
            self.say(f"Ending the stage early: {counters.no_gain} evaluations without a gain.")
        return True

    def _checkpoint_is_due(self) -> bool:
        step, settings = self.counters.step, self.settings.checkpoints
        if step in (0, self.last_saved):
            return False
        late = settings.minutes is not None and time.monotonic() - self.saved_at > 60 * settings.minutes
        return late or bool(settings.every and step % settings.every == 0)

    def _stage_is_over(self) -> bool:
        return self.counters.ended or self.counters.stage_step >= self.stage.optimisation.steps

    def _next_stage(self) -> bool:
        """Go over to the next stage; False where there is none."""
        counters = self.counters
        if not counters.history:
            raise CheckFailed(
                "Every step was skipped because its loss or gradient was not finite: nothing was written."
            )
        began = [e for e in counters.evaluations if e["step"] == counters.step - counters.stage_step]
        counters.stages.append(stage_summary(self.stage, counters, began[0] if began else None))
        if counters.stage + 1 == len(self.stages):
            return False
        counters.stage_best, counters.no_gain = None, 0
        known = state.optimizer_tensors(self.optimizer)
        tensors = state.model_tensors(self.network, counters.trained) if is_sharding(self.accelerator) else None
        if tensors is not None:
            self.model = self.optimizer = None
            self.accelerator.free_memory()  # what is sharded for one stage is not what the next one trains
        counters.stage, counters.stage_step, counters.ended, counters.annealed = counters.stage + 1, 0, False, None
        self._begin_stage(known, tensors)
        return True


def stage_number(loop: Loop) -> str:
    """ "2 of 3"."""
    return f"{loop.counters.stage + 1} of {len(loop.stages)}"
