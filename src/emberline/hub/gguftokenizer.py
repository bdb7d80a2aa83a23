"""Builds tokenizer.json and tokenizer_config.json from GGUF metadata (byte-level or SentencePiece BPE)."""

from __future__ import annotations

from array import array
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from emberline.core.errors import EmberlineError, ModelFileError, UnsupportedModel

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # GGUF token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
KIMI_PATTERN = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (  # applied one after the other
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2_PRE = ("gpt-2", "gpt2", "default", "phi-2", "olmo", "jina-v2-code")
_DIGIT_SPLITTING_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLIT_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_LLAMA3.replace("{1,3}", ""),)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "deepseek-v3": _DEEPSEEK3,
    "kimi-k2": (KIMI_PATTERN,),
    "tekken": (_TEKKEN,),
}
_NFC_PRE = ("qwen2", "deepseek-r1-qwen")  # the published tokenizers normalise to NFC; llama.cpp does not
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken", "kimi-k2")  # words in the vocabulary need no merges
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


class _GGUFVocabulary:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.model = metadata.get("tokenizer.ggml.model")
        self.pre = metadata.get("tokenizer.ggml.pre", "default")
        self.tokens: list[str] = self.get_list("tokens", str)
        self.types: list[int] = self.get_list("token_type", int) or [NORMAL] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise ModelFileError("the GGUF vocabulary is empty, or the numbers of tokens and token types differ")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ModelFileError("the GGUF vocabulary contains a token twice")

    def get_list(self, key: str, element_type: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list | array) or not all(isinstance(v, element_type) for v in values):
            raise ModelFileError(f"the GGUF key tokenizer.ggml.{key} must be a list of {element_type.__name__}")
        return list(values)

    def get_flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def special_token_text(self, key: str) -> str | None:
        i = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if i is None:
            return None
        if type(i) is not int or not 0 <= i < len(self.tokens):
            raise ModelFileError(f"the GGUF {key} token {i!r} is outside the vocabulary")
        return self.tokens[i]


def build_tokenizer_files(metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of tokenizer.json and the content of tokenizer_config.json."""
    vocab = _GGUFVocabulary(metadata)
    try:
        text, add_bos, add_eos = _build_tokenizer(vocab)
    except (EmberlineError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises Exception, and BaseException for panics in Rust
        raise ModelFileError(f"cannot build a tokenizer from the GGUF vocabulary: {e}") from e
    config = {
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "bos_token": vocab.special_token_text("bos"),
        "eos_token": vocab.special_token_text("eos"),
        "pad_token": vocab.special_token_text("padding"),
        "unk_token": vocab.special_token_text("unknown"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return text, config


def _build_tokenizer(vocab: _GGUFVocabulary) -> tuple[str, bool, bool]:
    if vocab.model == "gpt2":
        tokenizer, bos_default = _build_byte_level_bpe(vocab), vocab.pre in _BOS_BY_DEFAULT
    elif vocab.model == "llama":
        tokenizer, bos_default = _build_sentencepiece_bpe(vocab), True
    else:
        raise UnsupportedModel(f"GGUF tokenizer {vocab.model!r} is not supported", hint="supported: gpt2, llama")
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [t for t, k in zip(vocab.tokens, vocab.types, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    add_bos = vocab.get_flag("add_bos_token", bos_default) and vocab.special_token_text("bos") is not None
    add_eos = vocab.get_flag("add_eos_token", False) and vocab.special_token_text("eos") is not None
    if add_bos or add_eos:
        tokenizer.post_processor = _build_post_processor(vocab, add_bos, add_eos)
    return tokenizer.to_str(), add_bos, add_eos


def _build_post_processor(vocab: _GGUFVocabulary, add_bos: bool, add_eos: bool) -> processors.PostProcessor:
    before, after = (
        (vocab.special_token_text("bos") if add_bos else None),
        (vocab.special_token_text("eos") if add_eos else None),
    )
    single = [t for t in (before, "$A", after) if t]
    pair = [t for t in (before, "$A", after, before and f"{before}:1", "$B:1", after and f"{after}:1") if t]
    return processors.TemplateProcessing(single, pair, [(t, vocab.ids[t]) for t in {before, after} if t])


def _build_byte_level_bpe(vocab: _GGUFVocabulary) -> Tokenizer:
    merges = []
    for merge in vocab.get_list("merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab.ids or right not in vocab.ids or left + right not in vocab.ids:
            raise ModelFileError(f"the GGUF merge {merge[:80]!r} uses tokens outside the vocabulary")
        merges.append((left, right))
    if vocab.pre == "kimi-k2" and not merges:  # llama.cpp converts such files too, but reads tokens in another way
        raise UnsupportedModel("a GGUF vocabulary 'kimi-k2' without tokenizer.ggml.merges is not supported")
    tokenizer = Tokenizer(models.BPE(vocab.ids, merges, ignore_merges=vocab.pre in _WHOLE_WORDS_FIRST))
    if vocab.pre in _NFC_PRE:
        tokenizer.normalizer = normalizers.NFC()
    if vocab.pre in _GPT2_PRE:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif vocab.pre in _DIGIT_SPLITTING_PRE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif vocab.pre in _SPLIT_PATTERNS:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLIT_PATTERNS[vocab.pre]]
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, plain])
    else:
        hint = "use the model's safetensors checkpoint"
        raise UnsupportedModel(f"GGUF pre-tokenizer {vocab.pre!r} is not supported", hint=hint)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece_bpe(vocab: _GGUFVocabulary) -> Tokenizer:
    merges = _merges_from_scores(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab.ids, merges, unk_token=vocab.special_token_text("unknown"), fuse_unk=True, byte_fallback=True)
    )
    prefix = vocab.get_flag("add_space_prefix", True)
    space = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: _GGUFVocabulary) -> list[tuple[str, str]]:
    """Return the merges of token pairs in the order in which SentencePiece applies them.

    SentencePiece first merges the pair that forms the token with the highest score.
    """
    scores = vocab.get_list("scores", float)
    if len(scores) != len(vocab.tokens):
        raise ModelFileError(
            f"the GGUF vocabulary must have one score per token: {len(vocab.tokens)} tokens, {len(scores)} scores"
        )
    usable = {t for t, kind in zip(vocab.tokens, vocab.types, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in usable:
        for cut in range(1, min(len(token), 256)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[vocab.ids[token]], vocab.ids[left], vocab.ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
