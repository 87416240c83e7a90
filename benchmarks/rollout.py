"""Generation throughput: the native engine against transformers' generate, its continuous batching, and vLLM.

Same prompts and lengths for all, sampled at temperature 1, end tokens ignored; medians of interleaved repeats in one
run (vLLM, which wants the machine for itself, runs after the others). Example:

    python benchmarks/rollout.py --model /tmp/smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from _common import interleaved, load_model, load_tokenizer, median_rate, random_prompts, report


def main() -> None:
    args = parse_args()
    if args.vllm_worker:
        print(json.dumps(vllm_seconds(args)))
        return
    if "GLIBC_TUNABLES" not in os.environ:  # must stand before the process starts, as it does for the server
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    from verl_fl.platform.cpu import keep_freed_memory

    keep_freed_memory()  # as the server does; all rivals of this process have it
    if args.threads:
        torch.set_num_threads(args.threads)
    prompts = random_prompts(args.prompts, args.prompt_tokens, vocab_of(args))
    runs = {"native": native(args, prompts), "generate": generate(args, prompts)}
    continuous_reason = "skipped by --skip"
    if "continuous" not in args.skip:
        try:
            runs["continuous"], continuous_reason = tried(continuous(args, prompts)), None
        except Exception as error:  # whatever a rival dies of is a result to report, not ours to fail on
            continuous_reason = f"{type(error).__name__}: {error}"
    seconds = interleaved(runs, args.repeats)
    seconds["vllm"], vllm_reason = vllm(args)
    tokens = args.prompts * args.new_tokens
    rates = {f"{name}_tok_s": median_rate(tokens, s) if s else None for name, s in seconds.items()}
    rates.setdefault("continuous_tok_s", None)
    for name, s in seconds.items():
        print(f"{name:>11}: {rates[f'{name}_tok_s']} tokens/s, seconds {[round(x, 2) for x in s]}")
    ratio = round(rates["native_tok_s"] / rates["generate_tok_s"], 2)
    print(f"native / generate: {ratio}")
    result = {
        **rates,
        "ratio": ratio,
        "continuous_reason": continuous_reason,
        "vllm_reason": vllm_reason,
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
    }
    report(result, ("torch", "transformers", "vllm"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder, or a .gguf file")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=40, help="mean prompt length")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 keeps torch's default")
    parser.add_argument("--skip", nargs="*", default=[], choices=["continuous", "vllm"], help="rivals to leave out")
    parser.add_argument("--vllm-python", help="python of another environment that can import vllm")
    parser.add_argument("--vllm-worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def vocab_of(args: argparse.Namespace) -> int:
    return len(load_tokenizer(args.model))


def native(args: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], None]:
    from verl_fl.rollout.native.engine import NativeEngine
    from verl_fl.rollout.native.sampling import SamplingParams

    longest = args.prompt_tokens * 2 + args.new_tokens
    model = load_model(args.model, args.dtype)
    engine = NativeEngine(model, eos_token_ids=[], max_model_len=longest, max_num_seqs=args.prompts)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=True)

    def run() -> None:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        count = 0
        while engine.has_work():
            count += sum(len(output.token_ids) for output in engine.step())
        assert count == args.prompts * args.new_tokens, count

    return run


def generate(args: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], None]:
    import torch

    model = load_model(args.model, args.dtype, attn_implementation="sdpa")
    longest = max(map(len, prompts))
    ids = torch.tensor([[*[0] * (longest - len(p)), *p] for p in prompts])
    mask = torch.tensor([[*[0] * (longest - len(p)), *[1] * len(p)] for p in prompts])

    @torch.inference_mode()
    def run() -> None:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=args.new_tokens,
            max_new_tokens=args.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == longest + args.new_tokens, out.shape

    return run


def continuous(args: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], None]:
    import torch
    from transformers import GenerationConfig

    model = load_model(args.model, args.dtype, attn_implementation="sdpa")
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=args.new_tokens, eos_token_id=-1, pad_token_id=0)

    @torch.inference_mode()
    def run() -> None:
        out = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        count = sum(len(r.generated_tokens) for r in out.values())
        assert count == args.prompts * args.new_tokens, f"{count} tokens came back"

    return run


def tried(run: Callable[[], None]) -> Callable[[], None]:
    """The run, after one trial of it."""
    run()
    return run


def vllm(args: argparse.Namespace) -> tuple[list[float], str | None]:
    """Seconds of each repeat, or none and the reason."""
    if "vllm" in args.skip:
        return [], "skipped by --skip"
    if not args.vllm_python and importlib.util.find_spec("vllm") is None:
        return [], "vllm is not importable here and no --vllm-python was given"
    command = [args.vllm_python or sys.executable, *sys.argv, "--vllm-worker"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [], f"the vllm process ended with {done.returncode}: {done.stderr[-500:]}"
    return json.loads(done.stdout.strip().splitlines()[-1]), None


def vllm_seconds(args: argparse.Namespace) -> list[float]:
    from vllm import LLM, SamplingParams

    prompts: list[Any] = [
        {"prompt_token_ids": p} for p in random_prompts(args.prompts, args.prompt_tokens, vocab_of(args))
    ]
    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.prompt_tokens * 2 + args.new_tokens)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=0)
    return interleaved({"vllm": lambda: llm.generate(prompts, params, use_tqdm=False)}, args.repeats)["vllm"]


if __name__ == "__main__":
    main()
