"""Which sections a result has, in the order in which they answer questions."""

from __future__ import annotations

from layerbisect.report.accuracy import accuracy_section
from layerbisect.report.blocks import Section
from layerbisect.report.budget import budget_section
from layerbisect.report.case import culprits_section, environment_section, ruled_out_section
from layerbisect.report.gap import gap_section
from layerbisect.report.heatmap import heatmap_section
from layerbisect.report.layers import carried_section
from layerbisect.report.own_errors import own_error_section
from layerbisect.report.replay import replay_section
from layerbisect.report.results import AccuracyResult, ReplayResult, Result, VerdictResult
from layerbisect.report.routing import routing_section
from layerbisect.report.scores import score_sections
from layerbisect.report.selftest import selftest_section
from layerbisect.report.token_text import TokenText


def sections(result: Result, text: TokenText | None) -> tuple[Section, ...]:
    """The sections of a result, without those that it has nothing for."""
    found: tuple[Section | None, ...]
    if isinstance(result, VerdictResult):
        verdict = result.verdict
        found = (
            culprits_section(verdict),
            *score_sections(verdict, text),
            carried_section(verdict),
            own_error_section(verdict),
            heatmap_section(verdict),
            gap_section(verdict, text),
            routing_section(verdict),
            budget_section(verdict),
            ruled_out_section(verdict),
            environment_section(verdict),
        )
    elif isinstance(result, ReplayResult):
        found = (replay_section(result.replays, result.left_out, result.pairs),)
    elif isinstance(result, AccuracyResult):
        found = (accuracy_section(result.summary),)
    else:
        found = (selftest_section(result.data),)
    return tuple(section for section in found if section is not None)
