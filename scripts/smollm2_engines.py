"""Run SmolLM2 in both engines: SGLang's server on the CPU, and transformers; all into captures.

Every function fills a directory of ``work`` and is done again only where that directory is gone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from scripts import smollm2_plugin
from tests.sglang_server import Answer, Server, ServerError, sglang_server

if TYPE_CHECKING:
    import torch

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words why the sky is blue.",
    "Give me a recipe for tomato soup, step by step.",
    "Write a Python function that checks whether a number is prime, and explain it.",
    "List five tips for learning a new language.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Show your work.",
    "Write a polite email to a landlord asking to repair a broken window.",
    "What are the main differences between cats and dogs as pets?",
    "Summarise the plot of Romeo and Juliet in a few sentences.",
)
ANSWER = 96
"""Most tokens of an answer; it ends earlier where the model ends it."""
ENOUGH = 500
"""Response tokens that the case wants at least."""
RAISED = ("head", "stream", "head stream")
"""What is raised to float32 alone, and together."""


@dataclass(frozen=True)
class Conversation:
    """A prompt through the chat template, an answer, and what the server scored it with.

    Attributes:
        generated: log-probs of the answer's tokens as recorded at generation (nat)
        replayed: the same from a prefill of prompt and answer in the same server
        temperature: 0 where the answer was decoded greedily, 1 where it was sampled
    """

    prompt: list[int]
    answer: list[int]
    generated: list[float]
    replayed: list[float]
    temperature: float

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


def read_conversations(path: Path) -> list[Conversation]:
    """Read what :func:`serve` wrote beside a capture."""
    return [Conversation(**one) for one in json.loads(path.read_text())]


def prompts(model: Path) -> list[list[int]]:
    """Put every prompt through the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for text in PROMPTS
    ]


@contextmanager
def fresh(directory: Path) -> Iterator[Path]:
    """Yield a directory to fill, whose name appears only when the block succeeds."""
    scratch = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    yield scratch
    scratch.rename(directory)


def serve(
    model: Path,
    directory: Path,
    given: Sequence[Conversation] = (),
    *,
    requests: str = "*",
    arguments: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Let the server answer all prompts, and replay these answers twice and those in ``given``.

    Fills ``directory`` with ``conversations.json`` and ``capture``, which holds those of the
    requests ``generated-*``, ``replayed-*``, ``again-*`` and ``given-*`` that match ``requests``.
    """
    asked = prompts(model)
    with (
        fresh(directory) as folder,
        sglang_server(
            model,
            capture=folder / "capture",
            points="all",
            requests=requests,
            arguments=arguments,
        ) as server,
    ):
        say("the server is up; it generates")
        conversations = generate(server, asked)
        say("the server replays")
        for number, one in enumerate(conversations):
            replay = server.replay(one.tokens, rid=f"replayed-{number}")
            one.replayed[:] = _of_answer(replay, one)
            again = server.replay(one.tokens, rid=f"again-{number}")
            if _of_answer(again, one) != one.replayed:
                say(f"conversation {number} does not repeat")
        for number, one in enumerate(given):
            server.replay(one.tokens, rid=f"given-{number}")
        server.captured()
        write_json(folder / "conversations.json", [asdict(one) for one in conversations])


def _of_answer(replay: Answer, one: Conversation) -> list[float]:
    return [value for value in replay.prompt_logprobs[len(one.prompt) :] if value is not None]


def generate(server: Server, asked: Sequence[Sequence[int]]) -> list[Conversation]:
    """Answer all prompts in one batch, every other one greedily and the rest at temperature 1."""
    temperatures = [float(number % 2) for number in range(len(asked))]
    replies = server.post(
        "/generate",
        {
            "rid": [f"generated-{number}" for number in range(len(asked))],
            "input_ids": [list(prompt) for prompt in asked],
            "return_logprob": True,
            # a negative start asks for the answer's log-probs alone
            "logprob_start_len": -1,
            "sampling_params": [
                {"max_new_tokens": ANSWER, "temperature": t, "top_p": 1.0, "top_k": -1}
                for t in temperatures
            ],
        },
    )
    conversations = []
    for prompt, reply, temperature in zip(asked, replies, temperatures, strict=True):
        scored = reply["meta_info"]["output_token_logprobs"]
        answer = list(reply["output_ids"])
        if [token for _, token, *_ in scored] != answer:
            raise ServerError(f"the answer {answer} has log-probs of {scored}")
        generated = [value for value, *_ in scored]
        conversations.append(Conversation(list(prompt), answer, generated, [], temperature))
    tokens = sum(len(one.answer) for one in conversations)
    if tokens < ENOUGH:
        raise LayerBisectError(f"only {tokens} tokens were generated, {ENOUGH} are wanted")
    return conversations


def serve_raised(
    model: Path,
    directory: Path,
    given: Sequence[Conversation],
    *,
    say: Callable[[str], None] = print,
) -> None:
    """Replay ``given`` with the head, the stream, and both in float32; the rest in bfloat16.

    Fills ``directory`` with ``capture``, whose requests are ``head-*``, ``stream-*`` and
    ``head stream-*``.
    """
    with fresh(directory) as folder:
        switch = folder / "raised"
        switch.write_text("head")
        site = smollm2_plugin.install(folder / "site")
        with sglang_server(
            model,
            capture=folder / "capture",
            points="coarse",
            arguments=["--enable-fp32-lm-head"],
            environment={
                smollm2_plugin.FILE: str(switch.resolve()),
                "PYTHONPATH": str(site.resolve()),
            },
        ) as server:
            say("the server is up; it replays")
            for parts in RAISED:
                server.flush()
                switch.write_text(parts)
                for number, one in enumerate(given):
                    server.replay(one.tokens, rid=f"{parts}-{number}")
            server.captured()


def forward(
    model: Path,
    directory: Path,
    conversations: Sequence[Conversation],
    *,
    dtype: str = "bfloat16",
    raised: str = "",
    points: str = "all",
    advance: Callable[[int, int], None] | None = None,
) -> None:
    """Capture transformers' forward over whole conversations, one at a time.

    ``raised`` names the parts to compute in float32, as :data:`RAISED` has them.
    """
    import torch

    import layerbisect
    from layerbisect.loading import load_model

    loaded: Any = load_model(model, dtype=dtype)
    if "head" in raised:
        raise_head(loaded)
    if "stream" in raised:
        raise_stream(loaded)
    with fresh(directory) as folder:
        names = [f"forward-{number}" for number in range(len(conversations))]
        with layerbisect.capture(loaded, folder / "capture", points=points, names=names):
            for number, one in enumerate(conversations, 1):
                with torch.no_grad():
                    loaded(input_ids=torch.tensor([one.tokens]), use_cache=False)
                if advance is not None:
                    advance(number, len(conversations))


def raise_head(model: Any) -> None:
    """Compute the logits in float32, from the same final hidden state and the same weights."""
    import torch

    weight = model.lm_head.weight
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float32)
    head.weight = torch.nn.Parameter(weight.detach().float(), requires_grad=False)
    head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.lm_head = head


def raise_stream(model: Any) -> None:
    """Keep the residual stream in float32; all else computes and rounds as before."""
    import torch

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        # transformers' own steps, but the dtype is the weight's and not that of the input
        dtype = module.weight.dtype
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        normed: torch.Tensor = module.weight * (x * scale).to(dtype)
        return normed

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = norm.__get__(module)
    dtype = model.model.norm.weight.dtype
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: out.float())
    # it makes its tables in the dtype of the stream
    model.model.rotary_emb.register_forward_hook(
        lambda m, args, out: tuple(table.to(dtype) for table in out)
    )


def write_json(path: Path, data: Any) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.rename(path)
