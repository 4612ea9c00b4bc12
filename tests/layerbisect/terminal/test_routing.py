"""What a verdict says about routing."""

import dataclasses
import io

import pytest
from rich.console import Console

from layerbisect.bisect.routing_report import (
    CAUSES,
    Explained,
    Flip,
    GapSplit,
    LayerRouting,
    RouteGap,
    Routing,
)
from layerbisect.terminal.routing import render_routing, routing_sentence

GAPS = {
    "same": RouteGap(400, 0.0121),
    "context": RouteGap(150, 0.0133),
    "rerouted": RouteGap(38, 0.0912),
}


def explained(*counts: int, cause: str = "unexplained") -> Explained:
    flip = Flip(17, 1312, (3,), (61,), (0.31, -0.3), cause)  # type: ignore[arg-type]
    return Explained(
        causes=dict(zip(CAUSES, (*counts, *[0] * (len(CAUSES) - len(counts))), strict=True)),
        same_logits=0,
        astray={"rollout": 0, "trainer": 0},
        by_router=0,
        noise=0.0061,
        logits_differ=0.0058,
        examples=(flip,),
    )


def layer(number: int, told: Explained | None = None, **changes: object) -> LayerRouting:
    flips = sum(told.causes.values()) if told else 0
    one = LayerRouting(number, 640, flips, flips, 0.991, told, 0.0004, 0.02, 0.12, 0.0044, 0.06)
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def routing(*layers: LayerRouting, **changes: object) -> Routing:
    return dataclasses.replace(Routing(layers, GAPS), **changes)  # type: ignore[arg-type]


def rendered(shown: Routing, *, verbose: bool = False, labels: tuple[str, str] = ("a", "b")) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, color_system=None)
    render_routing(shown, labels, console, verbose=verbose)
    assert all(len(line) <= 100 for line in out.getvalue().split("\n"))
    return out.getvalue()


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (routing(layer(0), layer(1)), "routing: all 1,280 routes agree"),
        (
            routing(layer(0, explained(28)), layer(1, explained(13, 12))),
            "routing: 4.1 % of routes differ, all explained: 41 near ties, 12 consequences",
        ),
        (
            routing(layer(0, explained(1, 1, 2))),
            "routing: 0.6 % of routes differ, all explained: 1 near tie, 1 consequence, "
            "2 inherited",
        ),
        (
            routing(layer(0, explained(1, 0, 0, 7))),
            "routing: 1.2 % of routes differ, not all explained: 1 near tie, 7 unexplained",
        ),
        (
            routing(layer(0, explained(1, 0, 0, 0, 7))),
            "routing: 1.2 % of routes differ, not all explained: 1 near tie, 7 not known",
        ),
        (
            routing(layer(0, None, flips=5), layer(1, explained(2))),
            "routing: 0.5 % of routes differ, not all explained: 2 near ties, 5 not judged",
        ),
        (
            routing(layer(0, None, rows=64_000, flips=1)),
            "routing: <0.1 % of routes differ, not all explained: 1 not judged",
        ),
        (
            routing(layer(0), forced=("trainer",)),
            "routing: 0.0 % of routes differ; those of trainer were forced on it",
        ),
    ],
)
def test_the_sentence(shown: Routing, said: str) -> None:
    assert routing_sentence(shown) == said
    assert said in " ".join(rendered(shown).split())


def test_a_line_a_layer() -> None:
    page = rendered(routing(layer(3, explained(4, 0, 1, 2)), layer(11, order=None)))
    rows = {line.split()[0]: line.split()[1:] for line in page.split("\n") if line.strip()}
    assert rows["3"] == "1.1 % 0.991 7 4 0 1 2 0.0004 12 %".split()
    assert rows["11"] == "0.0 % 0.991 0 0 0 0 0 0.0004 -".split()
    # an engine without an order of slots leaves the column out
    page = rendered(routing(layer(3, explained(4), order=None)))
    assert "order" not in page and "weights" in page
    # of what could not be judged no cause is known
    page = rendered(routing(layer(5, None, flips=3, first=2)))
    rows = {line.split()[0]: line.split()[1:] for line in page.split("\n") if line.strip()}
    assert rows["5"] == "0.5 % 0.991 2 - - - - 0.0004 12 %".split()


def test_what_is_not_known_says_what_to_capture() -> None:
    told = dataclasses.replace(
        explained(1, 0, 0, 0, 7), lacking={"a": ("mlp.norm",), "b": ("mlp.norm",)}
    )
    page = " ".join(rendered(routing(layer(3, told))).split())
    assert "capture mlp.norm of both" in page and "7 0.0004" in page


def test_agreement_needs_no_table() -> None:
    assert rendered(routing(layer(0), layer(1))).strip() == "routing: all 1,280 routes agree"


def test_a_deep_model_shows_what_stands_out() -> None:
    flips = {30: explained(5, 0, 0, 1), 7: explained(90), 8: explained(40), 40: explained(60)}
    layers = [layer(at, flips.get(at, explained(1))) for at in range(48)]
    page = rendered(routing(*layers))
    numbers = [
        words[0]
        for line in page.split("\n")
        if (words := line.split()) and words[0].replace("-", "").isdigit()
    ]
    assert numbers == ["0-6", "7", "8", "9-29", "30", "31-39", "40", "41-47"]
    (run,) = (line.split() for line in page.split("\n") if line.split()[:1] == ["9-29"])
    assert run[4:9] == ["21", "21", "0", "0", "0"]
    everything = rendered(routing(*layers), verbose=True)
    assert all(f"\n  {at:>5}  " in everything for at in range(48))


def test_unexplained_flips_are_told_one_by_one() -> None:
    said = (
        "layer 2, position 17, token 1312: experts 3 against 61, ahead by 0.31 and -0.3 "
        "(rounding 0.0061): unexplained"
    )
    assert said in " ".join(rendered(routing(layer(2, explained(1, 0, 0, 1)))).split())
    inherited = routing(layer(2, explained(0, 0, 1, cause="inherited")))
    assert "against" not in rendered(inherited)
    assert "against" in rendered(inherited, verbose=True)
    many = routing(*(layer(at, explained(0, 0, 0, 1)) for at in range(9)))
    assert rendered(many).count("against") == 5


def test_what_rerouting_does_to_tokens() -> None:
    page = " ".join(rendered(routing(layer(2, explained(1)))).split())
    assert (
        "mean gap of tokens routed alike so far 0.0121 nat (400); after a re-routed token 0.0133 "
        "nat (150); re-routed 0.0912 nat (38). Stream that leaves layer 2: 0.0044 apart where "
        "routed alike, 0.06 where re-routed"
    ) in page
    none = {group: RouteGap(0, None) for group in GAPS}
    page = rendered(routing(layer(2, explained(1), stream_same=None), gaps=none))
    assert "nat" not in page and "Stream" not in page


def test_the_gap_is_split() -> None:
    parts = {"routes": 0.0121, "weights": -0.0012, "rest": 0.0122}
    split = GapSplit(580, 0.0231, 0.011, 0.0122, parts)
    page = " ".join(rendered(routing(layer(0), split=split), labels=("rollout", "b")).split())
    assert (
        "gap split by routes own routes 0.0231 nat, rollout's routes forced 0.0110, their "
        "weights too 0.0122, over 580 tokens: routes 0.0121, weights -0.0012, rest 0.0122 nat"
    ) in page
    # no layer need be shown for it
    parts = {"routes and weights": 0.0109, "rest": 0.0122}
    alone = GapSplit(580, 0.0231, None, 0.0122, parts)
    page = " ".join(rendered(Routing((), {}, split=alone)).split())
    assert page == (
        "gap split by routes own routes 0.0231 nat, a's routes and weights forced 0.0122, over 580 "
        "tokens: routes and weights 0.0109, rest 0.0122 nat"
    )
