"""The commands and their options. Everything else is imported by the command that needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_fl._version import __version__

app = typer.Typer(
    name="verl-fl",
    help="Stock verl on any AI accelerator, on several vendors in one job, and on no accelerator at all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"verl-fl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Stock verl on any AI accelerator, on several vendors in one job, and on no accelerator at all."""


_INPUT = "Your own input"
_SIZE = "Size of the run"
_KEEP = "What is kept"


@app.command()
def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Any further verl config override, as verl takes it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH|HF-ID|FILE.gguf", rich_help_panel=_INPUT, help="Default: a tiny model made here."),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", rich_help_panel=_INPUT, help="Prompts. Default: a toy task made here."),
    ] = None,
    val: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", rich_help_panel=_INPUT, help="Validate on these after the last step."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py|verl",
            rich_help_panel=_INPUT,
            help="A file with compute_score(), or verl's own scorer for the data_source.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(rich_help_panel=_SIZE, help="Training steps.")] = None,
    batch: Annotated[int | None, typer.Option(rich_help_panel=_SIZE, help="Prompts a step.")] = None,
    samples: Annotated[int | None, typer.Option(rich_help_panel=_SIZE, help="Answers a prompt.")] = None,
    prompt_length: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SIZE, help="Tokens of a prompt, at most."),
    ] = None,
    response_length: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SIZE, help="Tokens of an answer, at most."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="grpo|rloo|reinforce_plus_plus|ppo", rich_help_panel=_SIZE, help="Default: grpo."),
    ] = None,
    lr: Annotated[float | None, typer.Option(rich_help_panel=_SIZE, help="Learning rate of the actor.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16", rich_help_panel=_SIZE, help="What the model computes in."),
    ] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_SIZE, help="Default: 0.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=_KEEP, help="Run folder. Default: ./runs/quickstart-<time>."),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(rich_help_panel=_KEEP, help="Steps between checkpoints; 0: none. Default: 10."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=_KEEP, help="Go on with this run folder's last checkpoint."),
    ] = None,
) -> None:
    """Train with stock verl on this machine's CPU, in about two minutes, or on your own model, data and reward.

    With no option it makes a tiny model and a toy task and shows the reward rise. It ends with the path of
    summary.json. Errors in what you ask: exit code 2; a run that failed: 1; Ctrl-C: 130.
    """
    asked = {name: value for name, value in locals().items() if name not in ("resume", "overrides")}
    from verl_fl.cli import quickstart as command

    raise typer.Exit(command.run(asked, overrides or [], resume))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="List instead each vendor-specific place in the installed verl.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="machine|platform", help="This field alone, at once: neither torch nor verl nor a plugin is loaded."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="listen|ADDRESS",
            help="Measure instead how fast weights travel: 'listen' on one node says what to run on the other.",
        ),
    ] = None,
) -> None:
    """Say what is installed, which chip this is and why, what verl-fl changes in verl, and what is missing.

    Exit code 0: healthy. 1: something that verl-fl needs is missing or outside its range; with --audit, verl has a
    place that nobody has judged.
    """
    if audit:
        from verl_fl.cli import audit_view

        raise typer.Exit(audit_view.run(as_json=as_json))
    if link is not None:
        from verl_fl.weight_sync import probe

        raise typer.Exit(probe.main(["--listen"] if link == "listen" else ["--to", link]))
    from verl_fl.cli import doctor as command

    raise typer.Exit(command.run(as_json=as_json, only=only))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    short_help="Ask a platform all that a training relies on; report what holds, what does not and why.",
)
def conformance(context: typer.Context) -> None:
    """Hand everything to the kit's own command, which needs nothing but torch."""
    from verl_fl.testing.conformance.__main__ import main as command

    raise typer.Exit(command(context.args))


def main() -> None:
    """The entry point of the script ``verl-fl``."""
    from verl_fl.cli._exit import RunError, UsageError

    try:
        app()
    except (UsageError, RunError) as error:
        print(f"verl-fl: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
