"""The ready-made rewards by name, and what each may be given: `reward.args` of `reward.type`.

Invariant: a type has one section here and one function in `physarum.agents.rewards`; slime's names are other names of
these, never types of their own. Defaults alone make every type of SELF_CONTAINED work.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from physarum.configs.suggest import nearest
from physarum.configs.types import (
    Arguments,
    Count,
    HttpUrl,
    Name,
    Natural,
    Seconds,
    Section,
    VariableName,
    refuse,
    require_exactly_one,
)


def _compiles(value: object) -> object:
    """Refuses a pattern that the `regex` library cannot compile."""
    import regex  # type: ignore[import-untyped]  # only where a pattern is configured

    try:
        regex.compile(str(value))
    except regex.error as error:
        raise refuse("a regular expression", "correct the pattern", f"{value!r} ({error})") from None
    return value


Pattern = Annotated[str, BeforeValidator(_compiles)]


class MathReward(Section):
    """Equality of mathematical expressions (math-verify)."""

    answer: Literal["boxed", "anywhere"] = "boxed"
    """`boxed`: only what the last \\boxed{} holds counts; `anywhere`: math-verify looks for an expression itself."""
    timeout_s: Count = 5
    """For parsing, and again for comparing; whole seconds, as it is an alarm."""
    max_chars: Count = 1000
    """A longer answer is wrong without being parsed."""


class DeepscalerReward(Section):
    """As `math`, of what follows `</think>` (or `###Response`); 0 where neither is."""

    timeout_s: Count = 5
    max_chars: Count = 1000


class DapoReward(Section):
    """The last `Answer: ...` line among the last `tail_chars` characters, compared as an integer."""

    tail_chars: Count = 300
    right: float = 1.0
    wrong: float = -1.0


Normalisation = Literal["unicode", "case", "articles", "punctuation", "whitespace"]


class ExactReward(Section):
    """Equality of texts, each put through `normalise` in the order of its list."""

    normalise: tuple[Normalisation, ...] = ("whitespace",)


class F1Reward(Section):
    """Overlap of words."""

    yes_no: bool = True
    """HotpotQA's rule: yes, no and noanswer are right or wrong as a whole."""


class ChoiceReward(Section):
    """One letter among options."""

    letters: str = Field(default="ABCDEFGHIJ", min_length=2, max_length=26, pattern=r"^[A-Z]+$")
    """Where the row has neither `valid_letters` nor `choices`."""
    by_text: bool = True
    """An answer without a letter may give an option's text instead."""


class RegexReward(Section):
    """1 where the pattern is found."""

    pattern: Pattern
    mode: Literal["search", "fullmatch"] = "search"
    timeout_s: Seconds = 1.0
    """A match that is not found by then counts as none."""


class FormatReward(Section):
    """`<think>...</think><answer>...</answer>`: each tag once, in this order, and nothing but blanks outside."""

    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    opened: bool = False
    """The prompt already holds the first opening tag, as chat templates of reasoning models do."""


class IfbenchReward(Section):
    """Verifiable instructions of the row's metadata."""

    partial: bool = False
    """The share of instructions followed, instead of 1 for all of them and else 0."""
    loose: bool = False
    """IFEval's loose accuracy: also without first line, last line and asterisks."""
    max_chars: Natural = 100_000
    """A longer answer follows none."""


class BackendReward(Section):
    """An HTTP service that scores. `rate_per_s` and `concurrency` are the whole run's; hook processes share them equally."""

    token_env: VariableName | None = None
    """The variable that holds the token of `Authorization: Bearer`."""
    rate_per_s: Annotated[float, Field(gt=0)] | None = None
    """Requests begun in a second, evenly spaced; null: no limit."""
    concurrency: Count | None = None
    """Requests at once; null: as many as the hook processes run calls."""
    request_timeout_s: Seconds = 10.0
    deadline_s: Seconds = 25.0
    """For one score, waiting for its turn and all tries included; below `reward.timeout_s`."""
    attempts: Count = 10
    """Requests for one score, over about ten seconds where they fail at once. Only timeouts, lost connections and 5xx are
    tried again."""
    cache_entries: Natural = 10_000
    """Replies that a hook process keeps, by the digest of the request; 0: none."""
    max_reply_bytes: Count = 1 << 20


class RemoteReward(BackendReward):
    """slime's `remote_rm`: the service gets `fields` as JSON and answers a number, or an object with one under `key`."""

    url: HttpUrl
    fields: tuple[Literal["prompt", "response", "label", "metadata"], ...] = ("prompt", "response", "label")
    key: str = "score"


def _of_judge(value: object) -> object:
    """A pattern with one group, which holds the score."""
    import regex

    groups = regex.compile(str(value)).groups
    if groups != 1:
        raise refuse("a pattern with one group, around the score", "write it with one `(...)`", f"{groups} groups")
    return value


class ServedReward(BackendReward):
    """A model behind SGLang: exactly one of `url`, `engine`."""

    url: HttpUrl | None = None
    engine: Name | None = None
    """A group of `engines:` of this run; requests go to its ready engines, wherever they are started anew."""
    engines_file: str | None = None
    """Where the reward actor writes the addresses of `engine`; set by it."""
    engines_token_env: VariableName | None = None
    """The variable of the token of which the key of those engines is made, where they ask for one; set by the reward actor."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        require_exactly_one(self, ("url", "engine"))
        return self


class ClassifierReward(ServedReward):
    """A sequence classifier (`--is-embedding` of SGLang), asked at /classify with token ids."""

    render: Literal["chat", "tokens"] = "chat"
    """`chat`: the row's prompt and the answer as messages, by the classifier's own template and tokenizer. `tokens`: the whole
    sample as it is, of a classifier that shares the policy's tokenizer."""
    model: str | None = None
    """The classifier's folder, for its tokenizer; null: `engines.<engine>.model`."""
    output: Natural = 0
    """Which of the classifier's outputs is the score."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Applied to the outputs that the engine gives; some architectures have one of their own there."""
    scale: float = 1.0
    shift: float = 0.0
    """The reward is scale * score + shift."""
    max_tokens: Count | None = None
    """A longer text is refused by name, never cut: a failed try. Null: the engine's context decides."""


class ChatReward(ServedReward):
    """A model behind OpenAI's chat completions, as SGLang serves it at /v1/chat/completions."""

    model: str = "default"
    system: str | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Count = 512
    extra: Arguments = Field(default_factory=dict)
    """Further fields of the request, e.g. `chat_template_kwargs`."""


class JudgeReward(ChatReward):
    """A judge that gives one answer a score. Filled into its template are `{{prompt}}`, `{{response}}`, `{{label}}` and
    `{{transcript}}` (the whole sample, tools included)."""

    template: str = (
        "Rate how well the response answers the prompt, from 0 (useless) to 10 (perfect).\n\n[Prompt]\n{{prompt}}\n\n"
        "[Response]\n{{response}}\n\nThink briefly, then end with a line `Score: N`."
    )
    pattern: Annotated[str, BeforeValidator(_of_judge), BeforeValidator(_compiles)] = (
        r"(?i)score[\s*_]{0,4}[:=][\s*_]{0,4}(-?\d+(?:\.\d+)?)"
    )
    """The last match in the judge's answer is its score."""
    low: float = 0.0
    high: float = 10.0
    """Scores between `low` and `high` become 0 to 1; one outside is no score."""

    @model_validator(mode="after")
    def _range(self) -> JudgeReward:
        if self.low >= self.high:
            raise refuse("`low` below `high`", "correct one of them", f"`low: {self.low:g}` and `high: {self.high:g}`")
        return self


class CodeReward(Section):
    """The answer's program against tests, each run in a sandbox of its own (bubblewrap)."""

    python: str = Field(default="/usr/bin/python3", pattern=r"^/usr/")
    """Only /usr is seen inside, read-only."""
    partial: bool = False
    """The share of tests passed, instead of 1 for all and else 0."""
    compare: Literal["lines", "tokens"] = "lines"
    """Outputs are equal line by line but for blanks at their ends, or word by word."""
    timeout_s: Seconds = 5.0
    """For one test."""
    deadline_s: Seconds = 25.0
    """For all tests of an answer, below `reward.timeout_s`; those that did not run by then have failed."""
    memory_mib: Count = 512
    """Address space of one process inside."""
    processes: Count = 16
    disk_mib: Count = 32
    """All files together, in memory."""
    output_kib: Count = 256


class TournamentReward(ChatReward):
    """A judge that compares two answers to one prompt; the places of a tournament among a group's members are its rewards."""

    format: Literal["anchor", "round_robin", "single_elimination", "double_elimination", "swiss"] = "swiss"
    anchors: Natural | None = None
    """Of `anchor` (3) and of the seeding rounds of `single_elimination` (3) and `double_elimination` (1); 0: seeds by lot."""
    rounds: Count | None = None
    """Of `swiss`; null: ceil(log2 members) + 2."""
    both_orders: bool = True
    """Ask twice, with the answers in either order: a judge that prefers the first one then prefers nobody."""
    template: str = (
        "Compare two responses to one prompt.\n\n[Prompt]\n{{prompt}}\n\n[Response A]\n{{response_a}}\n\n"
        "[Response B]\n{{response_b}}\n\nThink briefly, then end with [[A]] if A is better, [[B]] if B is, [[C]] for a tie."
    )
    pattern: Annotated[str, BeforeValidator(_of_judge), BeforeValidator(_compiles)] = r"\[\[([ABC])\]\]"
    """The last match is the verdict, `A`, `B` or `C`; without one the judge could not tell."""

    @model_validator(mode="after")
    def _of_the_format(self) -> TournamentReward:
        if self.rounds is not None and self.format != "swiss":
            raise refuse("`rounds` with `format: swiss`", "remove `rounds`", f"`rounds` with `format: {self.format}`")
        if self.anchors is not None and self.format in ("swiss", "round_robin"):
            raise refuse("a format with anchors", "remove `anchors`", f"`anchors` with `format: {self.format}`")
        if self.anchors == 0 and self.format == "anchor":
            raise refuse("at least 1 anchor", "raise `anchors`, or leave it out", "`anchors: 0` with `format: anchor`")
        return self


SECTIONS: Final[dict[str, type[Section]]] = {
    "math": MathReward,
    "deepscaler": DeepscalerReward,
    "dapo": DapoReward,
    "exact": ExactReward,
    "f1": F1Reward,
    "choice": ChoiceReward,
    "regex": RegexReward,
    "format": FormatReward,
    "ifbench": IfbenchReward,
    "remote_rm": RemoteReward,
    "code": CodeReward,
    "judge": JudgeReward,
    "classifier": ClassifierReward,
}
GROUP_SECTIONS: Final[dict[str, type[Section]]] = {"tournament": TournamentReward}
"""`reward.group.type`."""
LIBRARIES: Final = {"math": "math_verify", "deepscaler": "math_verify"}
"""What a type imports beside the product's core, at its first row."""
ALIASES: Final = {"remote": "remote_rm", "gpqa": "choice", "multiple_choice": "choice"}
SELF_CONTAINED: Final = frozenset({"math", "deepscaler", "dapo", "exact", "f1", "choice", "format", "ifbench"})
"""What a row may name (`metadata.rm_type`) without being listed in `reward.row_types`."""
BOXED: Final = "boxed_"
"""Before a type of TEXTS: only what the last \\boxed{} holds is given to it (slime's prefix)."""
TEXTS: Final = frozenset({"dapo", "exact", "f1", "choice", "regex", "ifbench"})


_BOXED_ALREADY: Final = (f"{BOXED}math", f"{BOXED}remote_rm")


def canonical(name: str) -> str | None:
    """`boxed_gpqa` as `boxed_choice`; `boxed_math` as `math`, which reads the box itself; `boxed_remote_rm` as `remote_rm`, to
    which slime sends the whole answer too; None for what is no type."""
    if name in _BOXED_ALREADY:
        return name.removeprefix(BOXED)
    prefix = BOXED if name.startswith(BOXED) else ""
    bare = name.removeprefix(prefix)
    known = ALIASES.get(bare, bare)
    if known not in SECTIONS or (prefix and known not in TEXTS):
        return None
    return prefix + known


def section_of(canonical_name: str) -> type[Section]:
    """The section of a name that `canonical` returned."""
    return SECTIONS[canonical_name.removeprefix(BOXED)]


def remedy_for(name: str) -> str:
    """What to write instead of a name that is no type."""
    bare = name.removeprefix(BOXED)
    if canonical(bare) is not None and bare != name:
        return f"write `{bare}`: it reads no text that could be boxed"
    near = nearest(bare, [*SECTIONS, *ALIASES])
    known = ", ".join(sorted([*SECTIONS, *ALIASES]))
    return f"did you mean `{near}`" if near is not None else f"use one of: {known}"
