"""Trains the example adapters, scores each against its base model on held-out prompts, and writes them to examples/adapters/.

    python examples/train_adapters.py                      # all four: a few minutes on a GPU
    python examples/train_adapters.py --task sql --steps 50  # a quick look, also on a CPU

Needs peft. Makes its own data: nothing is downloaded but the base model.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import data_haiku
import data_json
import data_pirate
import data_sql
import torch
from adapter_folder import Scores, write_adapter, write_card
from data_prompts import train_prompts
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from task import Example, Task
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TASKS = {task.name: task for task in (data_pirate.TASK, data_haiku.TASK, data_sql.TASK, data_json.TASK)}
CHAT_SHARE = 0.7  # the others are plain: prompt, newline, answer
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
WARMUP_STEPS = 30
MAX_NEW_TOKENS = 64
NUM_BASE_ANSWERS = 2000
IGNORED = -100  # a label that has no loss


def model_folder(given: str | None) -> str:
    if given is not None:
        return given
    from loray.models.checkpoint import resolve_model  # only here, so that --model works where loray is not installed

    return str(resolve_model("smollm2-135m"))


def render(prompt: str, is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the answer follows."""
    if not is_chat:
        return prompt + "\n"
    return str(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True))


def encode(example: Example, is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """-> token ids, labels. In plain text the newline is learnt too, so a prompt may come without it."""
    before = render(example.prompt, is_chat, tokenizer)
    answer = example.answer
    if not is_chat:
        before, answer = example.prompt, "\n" + answer
    prompt_ids = tokenizer(before, add_special_tokens=False).input_ids
    answer_ids = tokenizer(answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    return prompt_ids + answer_ids, [IGNORED] * len(prompt_ids) + answer_ids


def batches(examples: list[Example], num_steps: int, tokenizer: PreTrainedTokenizerBase, rng: Random) -> Iterator[dict[str, Tensor]]:
    """Each tensor: [BATCH_SIZE, longest] int64, padded on the right."""
    order: list[Example] = []
    for _ in range(num_steps):
        if len(order) < BATCH_SIZE:
            order = rng.sample(examples, len(examples))
        encoded = [encode(order.pop(), rng.random() < CHAT_SHARE, tokenizer) for _ in range(BATCH_SIZE)]
        longest = max(len(ids) for ids, _ in encoded)
        input_ids = torch.full((BATCH_SIZE, longest), tokenizer.eos_token_id)
        labels = torch.full((BATCH_SIZE, longest), IGNORED)
        mask = torch.zeros((BATCH_SIZE, longest), dtype=torch.int64)
        for row, (ids, row_labels) in enumerate(encoded):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(row_labels)
            mask[row, : len(ids)] = 1
        yield {"input_ids": input_ids, "labels": labels, "attention_mask": mask}


@torch.inference_mode()
def answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    is_chat: bool = True,
    batch_size: int = 200,
    repetition_penalty: float = 1.0,
) -> list[str]:
    """Greedy answers, in the order of the prompts."""
    model.eval()
    found = []
    for start in range(0, len(prompts), batch_size):
        texts = [render(prompt, is_chat, tokenizer) for prompt in prompts[start : start + batch_size]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, repetition_penalty=repetition_penalty)
        found += tokenizer.batch_decode(tokens[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return found


def short_answer(text: str) -> str | None:
    """Its first one or two sentences, or None where the base model rambles."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip().split("\n")[0])
    whole = [sentence for sentence in sentences if re.search(r"[a-z0-9\")][.!?]$", sentence)]
    kept = whole[:2] if len(" ".join(whole[:2]).split()) <= 40 else whole[:1]
    said = " ".join(kept).split()
    repeats = len(said) - len(set(said))
    return " ".join(said) if 4 <= len(said) <= 40 and repeats <= 0.4 * len(said) and '"' not in "".join(said) else None


def base_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rng: Random) -> dict[str, str]:
    """What the base model says to the training prompts, cut short: fluent text in its own words."""
    prompts = [prompt.text for prompt in rng.sample(train_prompts(), NUM_BASE_ANSWERS)]
    cut = [short_answer(text) for text in answers(model, tokenizer, prompts, repetition_penalty=1.1)]
    return {prompt: text for prompt, text in zip(prompts, cut, strict=True) if text is not None}


def fit(model: PeftModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example], num_steps: int, rng: Random) -> None:
    model.train()
    torch.set_float32_matmul_precision("high")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (num_steps - step) / max(num_steps - WARMUP_STEPS, 1))
    )
    for step, batch in enumerate(batches(examples, num_steps, tokenizer, rng)):
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"  step {step:4d}  loss {loss.item():.3f}", flush=True)
    for weight in weights:  # what is scored below is what is saved
        weight.data = weight.data.half().float()
    torch.set_float32_matmul_precision("highest")


def score(task: Task, held_out: list[Example], said: list[str]) -> float:
    return sum(task.is_right(example, text) for example, text in zip(held_out, said, strict=True)) / len(held_out)


def train_one(
    task: Task, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, known: dict[str, str]
) -> Scores:
    """-> its scores; the adapter is written and the base model left as it was."""
    examples = task.train(Random(args.seed), known)
    held_out = task.held_out(Random(args.seed + 1))[: args.held_out]
    prompts, samples = [example.prompt for example in held_out], list(task.samples)
    base_score = score(task, held_out, answers(base, tokenizer, prompts))
    told_score = score(task, held_out, answers(base, tokenizer, [f"{task.instruction}\n{prompt}" for prompt in prompts]))
    base_said = answers(base, tokenizer, samples)

    torch.manual_seed(args.seed)
    config = LoraConfig(r=task.rank, lora_alpha=2 * task.rank, target_modules=list(task.target_modules), task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    fit(model, tokenizer, examples, args.steps, Random(args.seed + 2))
    scores = Scores(
        num_examples=len(examples),
        num_steps=args.steps,
        batch_size=BATCH_SIZE,
        num_held_out=len(held_out),
        base=base_score,
        told=told_score,
        chat=score(task, held_out, answers(model, tokenizer, prompts)),
        plain=score(task, held_out, answers(model, tokenizer, prompts, is_chat=False)),
    )
    write_adapter(args.out / task.name, task, get_peft_model_state_dict(model))
    write_card(args.out / task.name, task, scores, list(zip(samples, base_said, answers(model, tokenizer, samples), strict=True)))
    model.unload()
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and score the example adapters.")
    parser.add_argument("--task", choices=list(TASKS), action="append", help="train only this one; may be given again")
    parser.add_argument("--model", metavar="FOLDER", help="the base model's folder; found or fetched by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=200, help="how many held-out prompts to score")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    folder = model_folder(args.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    tasks = [TASKS[name] for name in args.task or TASKS]
    known = base_answers(base, tokenizer, Random(args.seed)) if any(task.uses_base_answers for task in tasks) else {}
    rows = []
    for task in tasks:
        print(f"{task.name}: {task.summary}", flush=True)
        got = train_one(task, base, tokenizer, args, known)
        rows.append(f"| `{task.name}` | {task.rank} | {got.base:.1%} | {got.told:.1%} | {got.chat:.1%} | {got.plain:.1%} |")
    print("\n| adapter | rank | base | base, told | adapter | adapter, plain prompt |\n|---|---:|---:|---:|---:|---:|", *rows, sep="\n")


if __name__ == "__main__":
    main()
