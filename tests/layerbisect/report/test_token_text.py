"""Text of tokens is shown as it is, and does nothing."""

import importlib.util
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import LayerBisectError
from layerbisect.models import SMOLLM2_PACKAGE
from layerbisect.report.token_text import TokenText, inert

tokenizers = pytest.importorskip("tokenizers")

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\a",
    "\u202eevil",
    "שלום",
    "\u2581word",
    "<0xE2>",
    "<0x98>",
    "<0x83>",
    "back\\slash",
    "\u0301",
    "a\u3000b  c d",
    "x" * 200,
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    """A tokenizer whose vocabulary is `HOSTILE`."""
    directory = tmp_path_factory.mktemp("hostile")
    vocabulary = {token: number for number, token in enumerate(HOSTILE)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token=HOSTILE[0])
    tokenizers.Tokenizer(model).save(str(directory / "tokenizer.json"))
    return TokenText.open(directory)


def byte_level(directory: Path) -> TokenText:
    """A byte-level tokenizer whose IDs are bytes, and then a special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<｜end▁of▁text｜>"])
    made.save(str(directory / "tokenizer.json"))
    return TokenText.open(directory)


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ('"><img src=x onerror=alert(1)>', '"><img src=x onerror=alert(1)>'),
        ("\a", "\\u0007"),
        ("\u202eevil", "\\u202eevil"),
        ("שלום", "שלום"),
        ("\u2581word", "␣word"),
        ("<0xE2>", "<0xE2>"),
        ("back\\slash", "back\\\\slash"),
        ("\u0301", "\\u0301"),
        ("a\u3000b  c d", "a\\u3000b␣␣c d"),
        ("x" * 200, "x" * 64 + "... (200 characters)"),
    ],
)
def test_a_tokens_text_is_inert_and_visible(hostile: TokenText, token: str, shown: str) -> None:
    assert hostile.text(HOSTILE.index(token)) == shown


def test_an_id_that_the_tokenizer_does_not_have_has_no_text(hostile: TokenText) -> None:
    for unknown in (len(HOSTILE), -1, 1 << 40):
        assert hostile.text(unknown) is None
    assert hostile.around([4, 99, 4], 1) == ("שלום", "<token 99>", "שלום")
    with pytest.raises(ValueError, match="at is 3"):
        hostile.around([4], 3)


def test_characters_that_tokens_share_are_put_together(hostile: TokenText) -> None:
    snow = [HOSTILE.index(byte) for byte in ("<0xE2>", "<0x98>", "<0x83>")]
    word = HOSTILE.index("\u2581word")
    assert hostile.around([*snow, word, *snow[:2]], 3) == ("☃", "␣word", "<0xE2><0x98>")
    assert hostile.around([word] * 9, 4, 2, 1) == ("␣word word", "␣word", "␣word")


def test_byte_level_tokens_are_read_as_bytes(tmp_path: Path) -> None:
    text = byte_level(tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    encoded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(" é\n").ids
    assert [text.text(one) for one in encoded] == ["␣", "<0xC3>", "<0xA9>", "\\n"]
    assert text.around([*encoded, 0], 4)[0] == "␣é\\n"
    # a special token is no bytes, though it has characters that stand for some
    assert text.text(len(alphabet)) == "<｜end▁of▁text｜>"


@pytest.mark.slow
def test_smollm2s_tokens_are_read(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        pytest.skip(f"{SMOLLM2_PACKAGE} is not installed")
    tokenizer = AutoTokenizer.from_pretrained(
        Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    tokenizer.save_pretrained(tmp_path)
    text = TokenText.open(tmp_path)
    for said in ("The gap of 0.03 nat.\n", "<script>\t日本語 😀", "naïve  שלום \u202e"):
        ids = tokenizer(said)["input_ids"]
        assert None not in [text.text(one) for one in ids]
        assert text.around([*ids, 0], len(ids), len(ids)) == (inert(said), "<|endoftext|>", "")


@given(st.text() | st.binary())
def test_nothing_that_is_shown_is_unseen(raw: str | bytes) -> None:
    shown = inert(raw)
    assert not [c for c in shown if unicodedata.category(c) in "Cc Cf Cs Co Cn Zl Zp".split()]
    assert "\ufffd" not in shown and shown == shown.strip()
    if raw and isinstance(raw, str):
        assert shown


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="\\")))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert inert(text) == text


def test_text_in_another_script_stays_as_it_is() -> None:
    for text in ("שלום", "naïve", "日本語", "😀", "مرحبا"):
        assert inert(text) == text


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayerBisectError, match="is no directory"):
        TokenText.open(tmp_path / "none")
    with pytest.raises(LayerBisectError, match="holds no tokenizer; give a checkpoint"):
        TokenText.open(tmp_path)


def test_a_model_directory_without_a_tokenizer_is_named(small_qwen3_dir: Path) -> None:
    with pytest.raises(LayerBisectError, match="holds no tokenizer; give a checkpoint"):
        TokenText.open(small_qwen3_dir)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(LayerBisectError, match="tokenizer.json holds no tokenizer: "):
        TokenText.open(tmp_path)


def test_other_kinds_of_tokenizers_are_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nword\n##ing\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    text = TokenText.open(tmp_path)
    assert [text.text(one) for one in (1, 5, 6, 7)] == ["[CLS]", "word", "##ing", None]


def test_a_tokenizers_own_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("word\n")
    (tmp_path / "own.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["own.Own", null]}, "tokenizer_class": "Own"}'
    )
    with pytest.raises(LayerBisectError, match="holds no tokenizer"):
        TokenText.open(tmp_path)
