"""Every architecture of the pinned llama.cpp: the activation of its FFN, or why it is refused.

Taken from the graphs in ``src/models`` and in ``cpp_patch/models``.  tests/patch/test_own_ffns.py
compares the lists with the pinned source, so moving the pin shows what to add or to change here.
"""

from __future__ import annotations

__all__ = ["computes_own_ffn", "needs_gate", "refusal", "usual_activation"]

# What build_ffn is asked for.  ``LLM_FFN_GELU`` is the tanh form, here called ``gelu``; the fused
# SWIGLU and GEGLU are ``silu`` and ``gelu`` of the first half.
_SILU = """
afmoe arwkv7 baichuan bitnet chameleon chatglm command-r cohere2 deci dream ernie4_5 exaone
exaone4 falcon-h1 glm4 granite granitehybrid hunyuan-dense hunyuan_vl internlm2 jais lfm2 llada
llama llama4 maincoder minicpm minicpm3 mistral3 muse-glimmer nanbeige olmo olmo2 openelm orion
paddleocr pangu-embedded phi3 plamo plamo2 plamo3 qwen qwen2 qwen2vl qwen3 qwen35 qwen3vl refact
rwkv6qwen2 seed_oss smollm3 stablelm talkie xverse
"""
_GELU = """
bloom codeshell falcon gemma gemma2 gemma3 gemma3n gemma4 gpt2 gptneox mpt phi2 spark2_5 starcoder
starcoder2
"""
_RELU = "opt"
_RELU_SQR = "arcee jais2 nemotron nemotron_h persimmon plm"

# More than the name decides (T5: gelu with a gate, relu without), or nobody has looked.
_VARYING = """
cogvlm dflash eagle3 gemma4-assistant granite_swa hrm_text jamba mamba mamba2 maple mellum mimo2
pockettts qwen3tts qwen4exp step35 t5 wavtokenizer-dec
"""
# With dense layers, if any, beside their experts; a file is refused for the tensors of experts.
_MIXTURES = """
arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek2-ocr
deepseek32 deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next gpt-oss
granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-linear laguna lfm2moe llada-moe minimax-01
minimax-m2 minimax-m3 mistral4 nemotron_h_moe olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next
qwen3vlmoe rnd1 smallthinker
"""
_EMBEDDING = """
bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
nomic-bert-moe t5encoder
"""
# Their graphs multiply the FFN matrices themselves, and no hook of ours is in them.
_OWN_FFN = "apertus graniteswitch kimi-k3 rwkv6 rwkv7"
_PROJECTOR = "clip"
# Compares the gate's values of a token with each other, so all of them must be there.
_NEEDS_GATE = "gemma3n"

_ACTIVATIONS = {
    arch: name
    for name, archs in (("silu", _SILU), ("gelu", _GELU), ("relu", _RELU), ("relu_sqr", _RELU_SQR))
    for arch in archs.split()
}
_KNOWN = frozenset(_ACTIVATIONS) | frozenset(
    (_VARYING + _MIXTURES + _EMBEDDING + " " + _OWN_FFN + " " + _PROJECTOR).split()
)


def usual_activation(arch: str, gated: bool = True) -> str:
    """What llama.cpp's graph of ``arch`` runs, or "" when more than its name decides."""
    if arch == "t5":
        return "gelu" if gated else "relu"
    return _ACTIVATIONS.get(arch, "")


def computes_own_ffn(arch: str) -> bool:
    """True for architectures whose FFN no hook of ours can serve or change."""
    return arch in _OWN_FFN.split()


def needs_gate(arch: str) -> bool:
    """True when the resident gate must decide, whatever else could."""
    return arch in _NEEDS_GATE.split()


def refusal(arch: str) -> str:
    """Why a model of ``arch`` cannot be a flash-GGUF, as the end of a sentence; "" if it can."""
    if not arch:
        return "it has no 'general.architecture'; it is no model"
    if arch in _PROJECTOR.split():
        return (
            "it is a vision projector ('clip'), no language model, and every image uses all of it; "
            "give the GGUF of the language model"
        )
    if arch in _EMBEDDING.split():
        return (
            f"'{arch}' is an embedding model: it reads a whole text at once, whose tokens together "
            "use every neuron, so there is nothing to leave on flash; run the dense model"
        )
    if computes_own_ffn(arch):
        return (
            f"the graph of architecture '{arch}' in llama.cpp multiplies the FFN matrices itself, "
            "in a way of its own that cannot be served from flash; run the dense model"
        )
    if arch not in _KNOWN:
        return (
            f"architecture '{arch}' is unknown to the llama.cpp of this version, which therefore "
            "could not run the file; install a newer gguf_flash"
        )
    return ""
