"""``verl-fl quickstart``: prepare the input, start stock verl, watch it, and say what came out."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_fl.cli import cause, command, curve, inputs, metrics, models, options, resume, summary
from verl_fl.cli._exit import INTERRUPTED, RunError
from verl_fl.cli.child import Child
from verl_fl.cli.options import Options
from verl_fl.cli.progress import Progress

_POLL_S = 0.2
_TERMINATED = 143


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C."""


def run(asked: dict[str, Any], overrides: list[str], resumed: Path | None) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: what was asked can't be done.
        RunError: verl ended with an error.
    """
    with _sigterm_as_interrupt():
        try:
            if resumed is not None:
                chosen, prepared = resume.load(resumed, asked, overrides)
            else:
                chosen = options.resolve(asked, overrides, Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S"))
                inputs.check(chosen)
                prepared = _prepare(chosen)
            return _train(chosen, prepared, resumed=resumed is not None)
        except KeyboardInterrupt as stop:
            return _TERMINATED if isinstance(stop, _Terminated) else INTERRUPTED


def _prepare(chosen: Options) -> dict[str, str | None]:
    """Make the run folder and what was not given; return the local paths of model, train and reward."""
    from verl_fl.cli import toy

    out = Path(chosen.out)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    print(f"run folder: {out}", flush=True)
    try:
        train, reward = out / "data" / "train.parquet", out / "reward.py"
        if chosen.train is None:
            print("making prompts and a reward function", flush=True)
            toy.make_data(train, reward, chosen.seed)
        if chosen.model is None:
            print("making a tiny model with random weights", flush=True)
            toy.make_model(out / "model", chosen.seed)
            model = str(out / "model")
        else:
            model = models.fetch(chosen, lambda text: print(text, flush=True))
    except BaseException:  # nothing was started, so nothing is kept
        shutil.rmtree(out, ignore_errors=True)
        for folder in made[1:]:
            with contextlib.suppress(OSError):  # another run may have put its own folder there
                folder.rmdir()
        raise
    own_reward = None if chosen.reward == "verl" else str(Path(chosen.reward or reward).expanduser().absolute())
    prepared = {"model": model, "train": chosen.train or str(train), "reward": own_reward}
    resume.save(chosen, prepared)
    return prepared


def _train(chosen: Options, prepared: dict[str, str | None], *, resumed: bool) -> int:
    out = Path(chosen.out)
    earlier = metrics.read(metrics.files(out))
    metrics_file = metrics.next_file(out)
    done = resume.checkpoint(out) if resumed else 0
    with Child(out, metrics_file) as child:
        line = command.command(
            chosen,
            model=str(prepared["model"]),
            train=str(prepared["train"]),
            reward=prepared["reward"],
            ray_dir=child.ray_dir,
            resume=resumed,
        )
        with Progress(chosen.steps, child.log, done) as progress:
            progress.say(f"starting stock verl (its output: {child.log})")
            try:
                child.start(line)
                exit_code = _watch(child, metrics_file, progress)
            except KeyboardInterrupt:
                progress.say("stopping verl and its Ray")
                _stop(child)
                progress.say(_interrupted(out, progress))
                raise
        if exit_code != 0:
            raise RunError(_failed(child, exit_code, progress))
    kept = [step for step in earlier if not progress.steps or step.number < progress.steps[0].number]
    _report(chosen, kept, progress, line)
    return 0


def _watch(child: Child, metrics_file: Path, progress: Progress) -> int:
    """Feed the progress until the run has ended; return its exit code."""
    steps, log = metrics.Tail(metrics_file), metrics.Tail(child.log, child.log_start)
    while True:
        exit_code = child.poll()  # before the last look at the files, so that nothing is missed
        for line in log.lines():
            progress.log_line(line)
        for line in steps.lines():
            if (step := metrics.parse(line)) is not None:
                progress.step(step)
        if exit_code is not None:
            return exit_code
        progress.tick()
        time.sleep(_POLL_S)


def _stop(child: Child) -> None:
    """End the run; a second Ctrl-C skips the patience, a third changes nothing."""
    with contextlib.suppress(KeyboardInterrupt):
        child.interrupt()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child.sweep()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(out: Path, progress: Progress) -> str:
    step = resume.checkpoint(out)
    lines = [f"stopped after step {progress.steps[-1].number}" if progress.steps else "stopped before the first step"]
    lines.append(f"kept: {out}" + (f", with a checkpoint of step {step}" if step else ", without a checkpoint"))
    if step:
        lines.append(f"go on: verl-fl quickstart --resume {out}")
    return "\n".join(lines)


def _failed(child: Child, exit_code: int, progress: Progress) -> str:
    log = child.log.read_bytes()[child.log_start :].decode("utf-8", "replace")
    found = cause.find(log)
    ended = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    where = f"after step {progress.steps[-1].number}" if progress.steps else "before the first step"
    lines = [f"the run failed {where} ({ended})", f"{found.kind}: {found.message}", f"  log: {child.log}"]
    if (ray_logs := child.keep_ray_logs()) is not None:
        lines.append(f"  Ray's own logs: {ray_logs}")
    return "\n".join(lines)


def _report(chosen: Options, earlier: list[metrics.Step], progress: Progress, line: list[str]) -> None:
    """Print the curve, write picture and summary, and list what was written; the summary's path comes last."""
    out = Path(chosen.out)
    steps = earlier + progress.steps
    if not steps:
        raise RunError(f"verl ended without an error and without a step\n  log: {out / 'run.log'}")
    png = out / "reward.png"
    curve.as_png(steps, png, f"verl-fl quickstart, seed {chosen.seed}")
    wall_s = (progress.train_seconds or 0.0) + sum(step.seconds for step in earlier)
    paths = {name: str(path) for name, path in _written(out).items()}
    target = summary.write(chosen, steps, wall_s, line, paths)
    print("\n" + curve.in_terminal(steps, width=min(shutil.get_terminal_size((80, 24)).columns, 100)))
    figures = json.loads(target.read_text(encoding="utf-8"))
    print(
        f"\nreward {figures['reward_first']} -> {figures['reward_last']} in {figures['steps']} steps, "
        f"{figures['train_seconds']} s, {figures['tokens_per_second']} tokens/s\n"
    )
    for name, score in figures["validation"].items():
        print(f"  {name}: {score:.4f}")
    for name, path in paths.items():
        print(f"  {name:<12}{path}")
    print(target)


def _written(out: Path) -> dict[str, Path]:
    names = {
        "model": "model",
        "prompts": "data/train.parquet",
        "reward": "reward.py",
        "checkpoints": "checkpoints",
        "curve": "reward.png",
        "log": "run.log",
        "options": "run.json",
    }
    found = {name: out / relative for name, relative in names.items() if (out / relative).exists()}
    return found | {f"metrics {index}": path for index, path in enumerate(metrics.files(out), start=1)}


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
