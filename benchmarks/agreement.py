"""How far are the rollout's log-probabilities from the trainer's? Before training, and after five steps of it.

    python benchmarks/agreement.py [--model PATH]

Last line: one JSON object with `fp32` and `bf16`, mean |log-prob difference| a token after five training steps, and
`fp32_first`, `bf16_first` before any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _common
from _training import hf_folder, train

METRIC = "training/rollout_log_probs_diff/mean"
FP32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder or a .gguf file; default: quickstart's tiny model")
    parser.add_argument("--lr", help="learning rate; default 1e-5, for the tiny model 1e-3")
    args = parser.parse_args()
    lr = f"actor_rollout_ref.actor.optim.lr={args.lr or ('1e-5' if args.model else '1e-3')}"
    result: dict[str, float] = {}
    for name, overrides in (("fp32", FP32), ("bf16", ())):
        with tempfile.TemporaryDirectory(prefix="agreement-") as text:
            folder = Path(text)
            steps = train(
                model_folder(args.model, folder),
                folder,
                steps=6,
                prompts=4,
                samples=4,
                new_tokens=24,
                overrides=(*overrides, lr),
            )
        result[f"{name}_first"], result[name] = steps[0][METRIC], steps[5][METRIC]
        print(f"{name}: {result[f'{name}_first']:.2e} before training, {result[name]:.2e} after five steps", flush=True)
    _common.report(result, ("verl-fl", "verl", "torch", "transformers"))


def model_folder(model: str | None, folder: Path) -> str:
    if model:
        return hf_folder(model, folder)
    from verl_fl.cli.toy import make_model

    make_model(folder / "model", seed=0)
    return str(folder / "model")


if __name__ == "__main__":
    main()
