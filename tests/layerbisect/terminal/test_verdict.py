"""What a verdict looks like."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    Culprit,
    Gap,
    LayerEvidence,
    PointDifference,
    Points,
    Probe,
    RoundingBudget,
    RuledOut,
    SmallestFault,
    Verdict,
)
from layerbisect.terminal.verdict import headline, render_verdict
from layerbisect.wording import bar, count, listed, nat, percent, size, times

LONG = "layerbisect bisect captures/rollout captures/trainer --model models/policy " + "--x " * 9


def layers(
    number: int, guilty: int, labels: tuple[str, str] = ("rollout", "trainer")
) -> tuple[LayerEvidence, ...]:
    found, carried = [], 0.0
    for layer in range(number):
        after = math.hypot(carried, 0.02 if layer == guilty else 0.002)
        own = {labels[0]: 6.9 if layer == guilty else 1.1, labels[1]: 1.05}
        point = "attn.context" if layer == guilty else "mlp.out"
        worst = dict.fromkeys(labels, f"layers.{layer}.{point}")
        found.append(LayerEvidence(layer, carried, after, own, worst))
        carried = after
    return tuple(found)


def culprit(**changes: object) -> Culprit:
    one = Culprit(
        layer=9,
        point="layers.9.attn.context",
        operator="attention",
        side="rollout",
        share_of_gap=0.41,
        own_error=6.9,
        floor=1.1,
        where="positions >= 96",
        evidence=("softmax scale +0.03 (384 standard errors from none)",),
    )
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


BUDGET = RoundingBudget(
    predicted_gap=0.0098,
    shares={"norm": 0.0021, "residual": 0.006, "linear": 0.003, "router": 0.0},
    whole=0.0072,
    quadrature=0.007,
    distances={"rollout": 0.0231, "trainer": 0.007},
    rows=580,
)


def verdict(**changes: object) -> Verdict:
    one = Verdict(
        status="divergent",
        gap=Gap(0.0231, 0.0021, 0.079, 0.1532, 0.4021, 580),
        culprits=(culprit(),),
        ruled_out=(RuledOut("stale weights", "291 fingerprints are equal"),),
        rounding_budget=BUDGET,
        coverage=Coverage(
            Points(224, ("rollout: layers.3.attn.q",)), CoveredRows(640, 4), ("4 rows have no key",)
        ),
        next=f"`{LONG.strip()}`",
        reasons=("1 operator errs beyond rounding",),
        layers=layers(16, 9),
        differences=(
            PointDifference("embed", 640, 1.0, 0, 0.0, 0.0, 0.0, 0.0, ()),
            PointDifference(
                "layers.9.input", 640, 0.5, 2, 0.001, 0.01, 0.02, 0.3, ((97, 1312, 0.3),)
            ),
        ),
        probe=Probe("scan", 34),
    )
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def rendered(shown: Verdict, *, width: int = 100, verbose: bool = False, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, **options)  # type: ignore[arg-type]
    render_verdict(shown, console, verbose=verbose)
    return out.getvalue()


def test_first_line_convicts() -> None:
    assert rendered(verdict()).split("\n")[0] == (
        "divergent: layers.9.attn.context (attention) on the rollout side makes 41 % of the gap; "
        "own error 6.9x rounding (floor 1.1x)"
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"culprits": (culprit(), culprit(layer=None, point="final_norm", operator="norm"))},
            "divergent: layers.9.attn.context (attention) on the rollout side makes 41 % of the "
            "gap; own error 6.9x rounding (floor 1.1x); and 1 more culprit",
        ),
        (
            {"culprits": (culprit(share_of_gap=None, side="both"),)},
            "divergent: layers.9.attn.context (attention) on both sides: own error "
            "6.9x rounding (floor 1.1x)",
        ),
        (
            # how far behind a choice is says less than that it does not follow
            {
                "culprits": (
                    culprit(
                        point="layers.9.mlp.expert_ids",
                        operator="router",
                        own_error=900.0,
                        evidence=("layers.9.mlp.expert_ids: the selection, not the logits",),
                    ),
                )
            },
            "divergent: layers.9.mlp.expert_ids (router) on the rollout side makes 41 % of the "
            "gap; the selection, not the logits",
        ),
        (
            {"culprits": (culprit(operator=None, point="layers.9", side="unknown"),)},
            "divergent: layers.9 on an unknown side makes 41 % of the gap; own error 6.9x "
            "rounding (floor 1.1x)",
        ),
        (
            {"culprits": (), "reasons": ("the gap is beyond rounding, and no layer makes it",)},
            "divergent: the gap is beyond rounding, and no layer makes it",
        ),
        (
            {"status": "agree", "culprits": (), "gap": Gap(0.0071, 0, 0.02, 0.03, 0.1, 580)},
            "agree: the gap of 0.0071 nat is rounding (0.0098 predicted for this model and dtype)",
        ),
        (
            {"status": "agree", "culprits": (), "gap": Gap(0, 0, 0, 0, 0, 580)},
            "agree: the log-probs of 580 tokens are equal",
        ),
        (
            {"status": "agree", "culprits": (), "reasons": ("within the tolerance",)},
            "agree: within the tolerance",
        ),
        (
            {"status": "unstable", "culprits": (), "reasons": ("the gap is one of repeats",)},
            "unstable: the gap is one of repeats",
        ),
        (
            {"status": "inconclusive", "culprits": (), "gap": None, "reasons": ("no rows", "more")},
            "inconclusive: no rows",
        ),
    ],
)
def test_headline(changes: dict[str, object], said: str) -> None:
    assert headline(verdict(**changes)) == said


def test_everything_that_the_verdict_knows_is_shown() -> None:
    page = rendered(verdict())
    for words in (
        "mean 0.0231 nat, p95 0.0790, p99 0.1532, max 0.4021, over 580 tokens",
        "mean +0.0021 nat, rollout minus trainer",
        "0.0098 nat predicted between the two sides; the gap is 2.4x that",
        "1. layers.9.attn.context  attention, layer 9, on the rollout side",
        "41 % of the squared gap; own error 6.9x rounding (floor 1.1x); where: positions >= 96",
        "- softmax scale +0.03 (384 standard errors from none)",
        "the kinds add in quadrature to 0.0070, the whole model rounded is 0.0072 (3 % apart)",
        "as captured: rollout 0.0231, trainer 0.0070",
        "costliest: residual; with it in float32",
        "stale weights: 291 fingerprints are equal",
        "224 compared; missing `rollout: layers.3.attn.q`",
        "640 joined, 4 left out",
        "scan (every boundary), 34 partial forwards",
        "note: 4 rows have no key",
    ):
        assert words in page
    # a command is copied whole
    assert f"next:\n    {LONG.strip()}\n" in page
    # a kind that the model has not is not in the budget
    assert "router" not in page.split("rounding budget")[1].split("ruled out")[0]


def test_layers_are_a_table_with_the_culprit_marked() -> None:
    table = rendered(verdict()).split("layers\n")[1].split("\n\n")[0].split("\n")
    assert len(table) == 2 + 16 + 1
    (marked,) = [line for line in table if line.startswith(">")]
    assert marked.split()[:2] == [">", "9"]
    assert "6.9x" in marked and "attn.context (rollout)" in marked
    assert table[-1].split()[0] == "head"


def test_a_deep_model_is_shown_short_and_whole_on_demand() -> None:
    deep = verdict(layers=layers(94, 40), culprits=(culprit(layer=40, point="layers.40.mid"),))
    short = rendered(deep).split("layers\n")[1].split("\n\n")[0].split("\n")
    assert len(short) < 20
    numbers = [line.removeprefix(">").split()[0] for line in short[2:]]
    assert {"0", "39", "40", "41", "93", "head"} <= set(numbers)
    # no layer is lost
    covered = set()
    for number in numbers[:-1]:
        first, _, last = number.partition("-")
        covered |= set(range(int(first), int(last or first) + 1))
    assert covered == set(range(94))
    whole = rendered(deep, verbose=True).split("layers\n")[1].split("\n\n")[0].split("\n")
    assert len(whole) == 2 + 94 + 1


def test_unprobed_boundaries_and_layers_without_own_errors_are_dashes() -> None:
    nothing = tuple(LayerEvidence(i, None, None, {}, {}) for i in range(4))
    page = rendered(verdict(layers=nothing, gap=None))
    table = page.split("layers\n")[1].split("\n\n")[0].split("\n")
    assert table[2].split() == ["0", "-", "-", "-", "-", "not", "captured"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_fit_the_width(width: int) -> None:
    labels = ("decode-of-a-long-name", "prefill-of-another-long-name")
    wide = verdict(
        labels=labels,
        layers=layers(94, 40, labels),
        culprits=(culprit(side=labels[0], evidence=("a sentence of words " * 20,)),),
        ruled_out=(RuledOut("a hypothesis", "evidence of many words " * 10),),
        next="",
    )
    out = rendered(wide, width=width, verbose=True).split("\n")
    # the first line is never broken in a file
    assert max(map(len, out[1:])) <= width


def test_no_colour_without_a_terminal_and_none_with_no_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "\x1b" not in rendered(verdict())
    monkeypatch.setenv("NO_COLOR", "1")
    page = rendered(verdict(), force_terminal=True)
    assert "\x1b[1m" in page
    assert not any(f"\x1b[{code}m" in page for code in ("31", "1;31", "36"))


def test_text_of_others_is_not_markup() -> None:
    page = rendered(
        verdict(
            culprits=(culprit(where="[bold]x[/bold]"),),
            coverage=Coverage(Points(1, ("[red]p",)), CoveredRows(1, 0), ("[/]",)),
        ),
        verbose=True,
    )
    assert "[bold]x[/bold]" in page and "[red]p" in page and "[/]" in page


def test_bars_are_ascii_where_the_output_is() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    out = Ascii()
    render_verdict(verdict(), Console(file=out, width=100, highlight=False))
    out.getvalue().encode("ascii")
    assert "####" in out.getvalue()


def test_differences_are_shown_on_demand() -> None:
    assert "worst position" not in rendered(verdict())
    table = rendered(verdict(), verbose=True).split("second\n")[1].split("\n\n")[0].split("\n")
    assert table[0].split() == ["worst", "its", "not"]
    assert table[1].split()[-3:] == ["position", "token", "finite"]
    assert table[2].split() == ["embed", "640", "100", "%", "0", "0", "0"]
    assert table[3].split()[-3:] == ["97", "1312", "2"]
    whole = verdict(differences=verdict().differences[:1])
    assert "not finite" not in rendered(whole, verbose=True)


SEEN = (
    SmallestFault("norm", "rollout", "output", 0.00101, "layers.3.mlp.norm", 3, 16),
    SmallestFault("linear", "rollout", "output", 0.00102, "layers.0.attn.q", 0, 16),
    SmallestFault("attention", "rollout", "output", 0.0021, "layers.9.attn.context", 9, 15),
    SmallestFault("head", "rollout", "logits", 0.0012, "logprob", None, 0),
    SmallestFault("linear", "trainer", "output", 1.6e-6, "layers.2.attn.q", 2, 16),
    SmallestFault("attention", "trainer", "output", 0.004, "layers.2.attn.context", 2, 16),
    SmallestFault("head", "trainer", "logits", 8e-7, "logprob", None, 0),
)


def test_the_smallest_fault_that_would_have_been_seen_is_told() -> None:
    page = rendered(verdict(sensitivity=SEEN), width=200)
    (said,) = [one for one in page.split("\n") if one.startswith("  seen")]
    assert said.endswith(
        "that would have been convicted: the whole output off by 0.1 % in norm "
        "of the rollout, linear; 0.4 % in attention; a factor on the logits off by 0.12 %"
    )
    assert "least seen at" not in page and "seen" not in rendered(verdict())
    table = rendered(verdict(sensitivity=SEEN), verbose=True).split("least seen at")[1].split("\n")
    assert len(table) > len(SEEN)
    assert table[3].split() == [
        "attention", "rollout", "0.21", "%", "output", "15", "layers", "layers.9.attn.context",
    ]  # fmt: skip


def test_what_several_operators_hide_and_the_final_norm_are_told_apart() -> None:
    coarse = tuple(
        one
        for side in ("rollout", "trainer")
        for one in (
            SmallestFault(None, side, "output", 0.0045, "layers.1.input", 0, 4),
            SmallestFault("norm", side, "output", 0.0003, "final_norm", None, 0),
        )
    )
    page = rendered(verdict(sensitivity=coarse), width=200)
    assert "off by 0.03 % in final norm; 0.45 % of what leaves several operators in one" in page


def test_numbers_in_words() -> None:
    assert [nat(v) for v in (None, 0.0, 4e-5, 0.0004, 0.0231, 12.345, math.nan)] == [
        "-",
        "0",
        "4.0e-05",
        "0.0004",
        "0.0231",
        "12.35",
        "not finite",
    ]
    assert [times(v) for v in (None, 1.07, 16.2, 412.0, 1e9, math.inf, math.nan)] == [
        "-",
        "1.1x",
        "16.2x",
        "412x",
        ">1e4x",
        "inf",
        "-",
    ]
    assert [percent(v) for v in (None, 0.0, 0.004, -0.004, 0.41, -0.03)] == [
        "-",
        "0 %",
        "<1 %",
        "> -1 %",
        "41 %",
        "-3 %",
    ]
    assert [count(1, "pass"), count(2, "pass"), count(1234, "row")] == [
        "1 pass",
        "2 passes",
        "1,234 rows",
    ]
    assert [size(n) for n in (999, 49_100_000, 2_000_000_000_000_000)] == [
        "999 bytes",
        "49.1 MB",
        "2000.0 TB",
    ]
    assert listed(["a", "b", "c"], 2) == "`a`, `b` and 1 more"
    assert [bar(v, 1.0, 10, "#") for v in (0.0, 0.001, 0.5, 2.0, None)] == [
        "",
        "#",
        "#####",
        "##########",
        "",
    ]
