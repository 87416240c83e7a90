"""One GRPO step of SmolLM2-135M on a CPU: stock verl with verl-fl, and TRL's GRPOTrainer, on the same work in turn.

    python benchmarks/grpo_step.py --model PATH [--trl-python /path/to/python]

TRL's needs clash with verl's, so it runs in an environment of its own, which is made if none is given.
Both keep fp32 weights and compute in bfloat16 (`trl_s`): small steps are then not rounded away. TRL with
weights in bfloat16 too, which is less work and another training, is measured beside it (`trl_bf16_weights_s`).
Last line: one JSON object with `verl_fl_s`, `trl_s` (medians of the steps after the first), `ratio`, `reward_curve`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from _arithmetic import compute_score, questions  # noqa: E402

PROMPTS, SAMPLES, NEW_TOKENS, LEARNING_RATE = 8, 8, 32, 2e-5


def main() -> None:
    args = parse()
    if args.only_trl:
        print(json.dumps(run_trl(args)))
        return
    from _training import hf_folder, train

    with tempfile.TemporaryDirectory(prefix="grpo_step-") as text:
        folder = Path(text)
        args.model = hf_folder(args.model, folder)
        trl = None if args.skip_trl else call_trl(args, folder, weights="float32")
        trl_bf16 = None if args.skip_trl else call_trl(args, folder, weights="bfloat16")
        overrides = (
            f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
            "actor_rollout_ref.rollout.dtype=bfloat16",
        )
        steps = train(
            args.model,
            folder,
            steps=args.steps,
            prompts=PROMPTS,
            samples=SAMPLES,
            new_tokens=NEW_TOKENS,
            overrides=overrides,
        )
    report(steps, trl, trl_bf16)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or a .gguf file of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20, help="steps of verl-fl (default 20)")
    parser.add_argument("--trl-steps", type=int, default=5, help="steps of TRL (default 5)")
    parser.add_argument("--weights", default="float32", choices=["bfloat16", "float32"], help=argparse.SUPPRESS)
    parser.add_argument("--trl-python", help="the python of an environment with trl 1.16")
    parser.add_argument("--skip-trl", action="store_true")
    parser.add_argument("--only-trl", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(steps: list[dict], trl: dict | None, trl_bf16: dict | None) -> None:
    import _common

    seconds = [step["timing_s/step"] for step in steps[1:]]
    ours = statistics.median(seconds)
    theirs = statistics.median(trl["seconds"][1:]) if trl else None
    rewards = [step["critic/rewards/mean"] for step in steps]
    shares = {
        key.removeprefix("timing_s/"): round(statistics.median(step[key] for step in steps[1:]), 2)
        for key in steps[-1]
        if key.startswith("timing_s/")
    }
    print(f"verl-fl {ours:.1f} s a step {shares}")
    print(f"TRL     {theirs:.1f} s a step" if theirs else "TRL     not run")
    _common.report(
        {
            "verl_fl_s": round(ours, 3),
            "trl_s": theirs and round(theirs, 3),
            "trl_bf16_weights_s": trl_bf16 and round(statistics.median(trl_bf16["seconds"][1:]), 3),
            "ratio": theirs and round(theirs / ours, 3),
            "reward_curve": [round(reward, 4) for reward in rewards],
            "reward_first": round(statistics.mean(rewards[:3]), 4),
            "reward_last": round(statistics.mean(rewards[-3:]), 4),
            "shares_s": shares,
            "log_prob_diff": round(statistics.mean(step["training/rollout_log_probs_diff/mean"] for step in steps), 6),
            "trl_version": trl and trl["version"],
            "trl_reward_curve": trl and trl["rewards"],
        },
        ("verl-fl", "verl", "torch", "transformers", "ray"),
    )


# --- TRL, in its own environment ------------------------------------------------------------------------------------


def call_trl(args: argparse.Namespace, folder: Path, weights: str) -> dict:
    python = args.trl_python or make_environment()
    command = [python, __file__, "--only-trl", "--model", args.model, "--weights", weights]
    command += ["--trl-steps", str(args.trl_steps)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode:
        sys.exit("TRL ended with an error:\n" + result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


def make_environment() -> str:
    """An environment with TRL 1.16 beside the repository, made once."""
    folder = HERE.parent / ".venv-trl"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing TRL into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "trl==1.16.0"], check=True)
    return str(python)


def run_trl(args: argparse.Namespace) -> dict:
    """TRL at its best on a CPU: no reference model, no gradient checkpointing, all samples in one forward."""
    import time

    import torch
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    seconds: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.start)

        def on_log(self, _args, _state, _control, logs=None, **__):
            if logs and "reward" in logs:
                rewards.append(round(float(logs["reward"]), 4))

    def reward(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [compute_score("arithmetic", text, truth) for text, truth in zip(texts, answer, strict=True)]

    pairs = questions(PROMPTS * args.trl_steps)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs])
    config = trl.GRPOConfig(
        output_dir="rival", use_cpu=True, bf16=True, per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1, num_generations=SAMPLES, max_completion_length=NEW_TOKENS,
        learning_rate=LEARNING_RATE, max_steps=args.trl_steps, logging_steps=1, report_to="none", beta=0.0,
        save_strategy="no", gradient_checkpointing=False, shuffle_dataset=False,
        model_init_kwargs={"dtype": getattr(torch, args.weights), "attn_implementation": "sdpa"},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=args.model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()]
    )
    trainer.train()
    return {"seconds": seconds, "rewards": rewards, "version": trl.__version__}


if __name__ == "__main__":
    main()
