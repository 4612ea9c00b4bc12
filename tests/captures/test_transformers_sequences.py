"""Rows of padded, packed, chunked and decoded batches are those of the plain sequences."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.captures.telling import CaptureWarning
from layerbisect.captures.transformers_calls import cache_name

VOCAB = 512
LENGTHS = (12, 20, 16)
PROMPTS = (5, 9, 8)
POINTS = "all"


@pytest.fixture(scope="module")
def model(small_moe_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        small_moe_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def plain(
    model: Any, sequences: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Capture:
    """Each sequence alone, in one forward."""
    directory = tmp_path_factory.mktemp("plain") / "c"
    with torch.no_grad(), capture(model, directory, points=POINTS):
        for tokens in sequences:
            model(input_ids=torch.tensor([tokens]), use_cache=False)
    return Capture.open(directory)


def _same_rows(taken: Capture, plain: Capture, *, loosely: float = 0.03) -> None:
    """Every row joins a plain one by its key, and holds what that one holds but for rounding."""
    assert not taken.problems and taken.keys.known.all()
    row_of = {key.tobytes(): row for row, key in enumerate(plain.keys.key)}
    at = np.array([row_of[key.tobytes()] for key in taken.keys.key])
    assert np.array_equal(taken.rows.token, plain.rows.token[at])
    for point in ("embed", "layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"):
        # rotation by the same angles of the same vectors: no reduction that could differ in order
        assert _relative(taken.read(point), plain.read(point, at)) < 0.004
    for layer in range(4):
        for suffix in ("input", "attn.q", "attn.k", "attn.v", "attn.context", "attn.out", "mid"):
            point = f"layers.{layer}.{suffix}"
            assert _relative(taken.read(point), plain.read(point, at)) < loosely
    assert _relative(taken.read("final_norm"), plain.read("final_norm", at)) < loosely
    score_of = dict(
        zip((k.tobytes() for k in plain.scores.keys.key), plain.scores.logprob, strict=True)
    )
    theirs = np.array([score_of[key.tobytes()] for key in taken.scores.keys.key])
    assert len(theirs) and np.abs(taken.scores.logprob - theirs).mean() < 0.1


def _relative(ours: Any, theirs: Any) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _padded(
    sequences: Sequence[Sequence[int]], side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences)) + 1
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(3, width).long()
    for row, tokens in enumerate(sequences):
        at = slice(0, len(tokens)) if side == "right" else slice(width - len(tokens), width)
        ids[row, at], mask[row, at] = torch.tensor(tokens), 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(
    side: str, model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    ids, mask, positions = _padded(sequences, side)
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    taken = Capture.open(tmp_path / "c")
    assert len(taken.rows) == sum(LENGTHS) and len(taken.scores.rows) == sum(LENGTHS) - 3
    assert [s.name for s in taken.sequences] == ["s0", "s1", "s2"]
    _same_rows(taken, plain)


def test_left_padding_without_positions_is_told(
    model: Any, sequences: list[list[int]], tmp_path: Path
) -> None:
    ids, mask, _ = _padded(sequences, "left")
    with torch.no_grad(), pytest.warns(CaptureWarning, match="position_ids differ"):
        with capture(model, tmp_path / "c"):
            model(input_ids=ids, attention_mask=mask)
    taken = Capture.open(tmp_path / "c")
    assert taken.keys.known.all() and len(taken.rows) == sum(LENGTHS)


def test_packing(model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path) -> None:
    ids = torch.tensor([sum(sequences, [])])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    taken = Capture.open(tmp_path / "c")
    # the first token of a packed sequence is not scored by the last one of another
    assert len(taken.rows) == sum(LENGTHS) and len(taken.scores.rows) == sum(LENGTHS) - 3
    _same_rows(taken, plain)


def test_packing_with_a_cache_is_told(
    model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    # transformers then lets the packed sequences attend to each other
    ids = torch.tensor([sum(sequences, [])])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad(), pytest.warns(CaptureWarning, match="attended to each other"):
        with capture(model, tmp_path / "c", points="layers.0.attn.context"):
            model(input_ids=ids, position_ids=positions)
    taken = Capture.open(tmp_path / "c")
    own, theirs = (c.read("layers.0.attn.context") for c in (taken, plain))
    assert _relative(own[:12], theirs[:12]) < 0.004 < 0.1 < _relative(own[12:], theirs[12:])


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": 3}, {"batch_size": 3}, {"batch_size": 2, "chunk": 5}],
    ids=["alone", "chunks", "batch", "batch in chunks"],
)
def test_decoding(
    options: dict[str, int],
    model: Any,
    sequences: list[list[int]],
    plain: Capture,
    tmp_path: Path,
) -> None:
    with capture(model, tmp_path / "c", points=POINTS, label="rollout"):
        scores = decode_like_rollout(model, sequences, PROMPTS, **options)
    taken = Capture.open(tmp_path / "c")
    assert len(taken.rows) == sum(LENGTHS) and len(taken.scores.rows) == sum(LENGTHS) - 3
    decoded = taken.phases == "decode"
    assert decoded.sum() == sum(LENGTHS) - sum(PROMPTS)
    assert set(taken.phases[~decoded]) == {"prefill"}
    _same_rows(taken, plain)
    for number, (tokens, prompt) in enumerate(zip(sequences, PROMPTS, strict=True)):
        rows = taken.scores.rows
        name = [s.name for s in taken.sequences].index(f"s{number}")
        mine = (rows.sequence == name) & (rows.position >= prompt)
        order = np.argsort(rows.position[mine])
        assert len(scores[number]) == len(tokens) - prompt
        assert np.array_equal(taken.scores.logprob[mine][order], scores[number])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], [1, 1]), "1 sequences and 2 prompt lengths"),
        (([[1, 2]], [3]), "prompt length 3 of sequence 0 is not between 1 and its 2 tokens"),
        (([[1, 2]], [0]), "prompt length 0"),
        (([[1, 2]], [1], 0), "chunk 0"),
    ],
)
def test_decoding_refuses_lengths_that_do_not_fit(arguments: Any, message: str, model: Any) -> None:
    with pytest.raises(LayerBisectError, match=message):
        decode_like_rollout(model, *arguments)


def test_a_static_cache(
    model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    ids = torch.tensor([sequences[1]])
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        for start, stop in ((0, 9), (9, 10), (10, 20)):
            model(input_ids=ids[:, start:stop], **{cache_name(model): cache})
    taken = Capture.open(tmp_path / "c")
    assert len(taken.rows) == 20
    _same_rows(taken, plain)


def test_only_some_logits(
    model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    ids, mask, positions = _padded(sequences, "left")
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        model(**given, logits_to_keep=5)
        model(**given, logits_to_keep=torch.tensor([-3, -2]))
    taken = Capture.open(tmp_path / "c")
    # k rows of logits score the tokens after them, and the last row has none after it
    assert len(taken.scores.rows) == 3 * (4 + 2)
    _same_rows(taken, plain)


def _rows_agree_with(model: Any, taken: Capture, directory: Path) -> None:
    """Every row's key is that of a plain forward over the tokens that its name stands for."""
    assert not taken.problems and taken.keys.known.all()
    with torch.no_grad(), capture(model, directory, points=POINTS):
        for tokens in _tokens(taken.directory).values():
            known = [tokens[position] for position in range(len(tokens))]
            model(input_ids=torch.tensor([known]), use_cache=False)
    _same_rows(taken, Capture.open(directory), loosely=0.06)


def _tokens(directory: Path) -> dict[str, dict[int, int]]:
    """Each sequence's tokens by position, from the files alone: rows and cached prefixes."""
    found: dict[str, dict[int, int]] = {}
    for path in directory.glob("rank-0/pass-*"):
        with safe_open(path, "pt") as file:
            names = [s["name"] for s in json.loads(file.metadata()["layerbisect"])["sequences"]]
            for group in ("rows", "context"):
                if f"{group}.token" in file.keys():  # noqa: SIM118 - it is no mapping
                    columns = ("sequence", "position", "token")
                    table = [file.get_tensor(f"{group}.{c}").tolist() for c in columns]
                    for sequence, position, token in zip(*table, strict=True):
                        found.setdefault(names[sequence], {})[position] = token
    return found


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams: int, model: Any, sequences: list[list[int]], tmp_path: Path) -> None:
    ids, mask, _ = _padded(sequences, "left")
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            num_beams=beams,
            do_sample=False,
            pad_token_id=0,
        )
    taken = Capture.open(tmp_path / "c")
    assert len(taken.rows) == beams * (sum(LENGTHS) + 3 * 4)
    if beams == 1:
        assert len(taken.scores.rows) == 3 * 4
        made = np.sort(taken.rows.token[taken.phases == "decode"])
        assert np.array_equal(made, np.sort(out[:, -5:-1].numpy().reshape(-1)))
    _rows_agree_with(model, taken, tmp_path / "again")


def _crop(cache: Any) -> Any:
    cache.crop(-3)
    return cache


def _reorder(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def _select(cache: Any) -> Any:
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def _repeat(cache: Any) -> Any:
    cache.batch_repeat_interleave(2)
    return cache


@pytest.mark.parametrize("change", [_crop, _reorder, _select, _repeat, copy.deepcopy])
def test_a_changed_cache_is_recognised(
    change: Callable[[Any], Any], model: Any, tmp_path: Path
) -> None:
    ids = torch.randint(1, VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        model(input_ids=ids, **{cache_name(model): cache})
        kept = change(cache)
        batch = kept.layers[0].keys.shape[0]
        for start in (0, 4):
            more = torch.arange(start + 1, start + 1 + 4 * batch).reshape(batch, 4)
            model(input_ids=more, **{cache_name(model): kept})
        if kept is not cache:
            model(input_ids=ids[:, :3], **{cache_name(model): cache})
    taken = Capture.open(tmp_path / "c")
    _rows_agree_with(model, taken, tmp_path / "again")


def test_a_cache_from_elsewhere_has_no_known_prefix(model: Any, tmp_path: Path) -> None:
    ids = torch.randint(1, VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :6], use_cache=True)[cache_name(model)]
        with pytest.warns(CaptureWarning, match="filled outside of the capture"):
            with capture(model, tmp_path / "c", points=POINTS):
                model(input_ids=ids[:, 6:8], **{cache_name(model): cache})
                model(input_ids=ids[:, 8:], **{cache_name(model): cache})
    taken = Capture.open(tmp_path / "c")
    assert taken.rows.position.tolist() == [6, 7, 6, 7, 8, 9, 8, 9]
    assert not taken.keys.known.any()


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_a_cache_is_found_under_its_old_name(
    model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    # transformers warns of it from 5.24 on, and takes it
    ids = torch.tensor([sequences[0]])
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), capture(model, tmp_path / "c", points=POINTS):
        for start, stop in ((0, 5), (5, 12)):
            model(input_ids=ids[:, start:stop], past_key_values=cache)
    taken = Capture.open(tmp_path / "c")
    assert taken.rows.position.tolist() == list(range(12))
    _same_rows(taken, plain)


def test_a_model_that_takes_no_cache_is_refused() -> None:
    with pytest.raises(LayerBisectError, match="forward of Linear takes neither cache nor past_"):
        cache_name(torch.nn.Linear(2, 2))


def test_a_cache_of_an_earlier_capture_goes_on(
    model: Any, sequences: list[list[int]], plain: Capture, tmp_path: Path
) -> None:
    ids = torch.tensor([sequences[0]])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        with capture(model, tmp_path / "one", points=POINTS):
            model(input_ids=ids[:, :8], **{cache_name(model): cache})
        with capture(model, tmp_path / "two", points=POINTS):
            # takes the name s0 first, so the cached sequence must not be called that
            model(input_ids=torch.tensor([sequences[1]]), use_cache=False)
            model(input_ids=ids[:, 8:], **{cache_name(model): cache})
    taken = Capture.open(tmp_path / "two")
    assert [s.name for s in taken.sequences] == ["s0", "s0~1"]
    assert taken.rows.position[20:].tolist() == [8, 9, 10, 11]
    _same_rows(taken, plain)


def test_names_and_salts(model: Any, tmp_path: Path) -> None:
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    with torch.no_grad():
        with capture(model, tmp_path / "c", names=["a", "b", "c"], salts=["", "lora-1"]):
            model(input_ids=first)
            model(input_ids=second)
            model(input_ids=first)
    taken = Capture.open(tmp_path / "c")
    named = [(s.name, s.salt) for s in taken.sequences]
    assert named == [("a", ""), ("b", "lora-1"), ("c", ""), ("s3", "")]
    key = taken.keys.key.reshape(4, 3)
    # the same tokens in another context are other rows, and in the same one repeats
    assert not (key[0] == key[1]).any() and (key[0] == key[3]).all()


def test_one_name_for_two_token_lists_is_told_apart(model: Any, tmp_path: Path) -> None:
    with torch.no_grad(), pytest.warns(CaptureWarning, match="'a' stands for two lists of tokens"):
        with capture(model, tmp_path / "c", names=["a", "a", "a"]):
            model(input_ids=torch.tensor([[5, 6, 7]]))
            model(input_ids=torch.tensor([[5, 6, 8]]))
            model(input_ids=torch.tensor([[5, 6, 7, 8]]))
    taken = Capture.open(tmp_path / "c")
    assert [s.name for s in taken.sequences] == ["a", "a~1"]
    assert taken.keys.known.all() and len(taken.rows) == 10
