"""Exercises: stub and answer are one text, guesses stand, verdicts speak, own forms are checked."""

import importlib
import itertools
import math
import traceback
from fractions import Fraction
from pathlib import Path

import jedi
import pytest

import marks
import paralab as pl
from judged import TABLES, Table, defined, stored
from paralab.exercises import sources
from paralab.exercises.answers.zero_step import MyZero1
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Exercise, Takes
from paralab.exercises.questions import wrong_number
from paralab.exercises.verdict import Notes
from refusals import refuses

OWN = pl.exercises.own_schedule
EXERCISES = list(pl.exercises.ALL.values())
states, devices = stored("model_states", "model_states", "devices_needed")


# ---- the exercises -------------------------------------------------------------------------------
def test_every_exercise_that_runs_has_a_table_of_answers():
    for path in Path(__file__).parent.glob("test_exercise*.py"):
        importlib.import_module(path.stem)
    assert {one.exercise.name for one in TABLES} == {
        one.name for one in EXERCISES if not one.patients
    }


@pytest.mark.parametrize("name", ["summa", "my_ddp"])  # the first is a module's name, too
def test_an_editor_knows_what_an_exercise_has_without_running_anything(name):
    code = f"import paralab as pl\npl.exercises.{name}.ch"
    assert "check" in [one.name for one in jedi.Script(code).complete()]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_hints_come_one_at_a_time_and_end_kindly(exercise):
    exercise._hints_given = 0
    said = [repr(exercise.hint()) for _ in range(4)]
    for number, text in enumerate(said[:3], 1):
        assert text.startswith(f"hint {number} of 3 for {exercise.name}: ")
    assert "solution()" in said[3] and repr(exercise.hint(1)) == said[0]
    with pytest.raises(ValueError, match=r"number=4.*legal: a whole number from 1 to 3"):
        exercise.hint(4)
    exercise._hints_given = 0


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_an_exercise_shows_its_task_and_every_limit(exercise):
    shown = exercise._repr_markdown_()
    assert f"pl.exercises.{exercise.name}.check(" in shown
    for limit, required in exercise.required.items():
        assert f"| {limit} | {required} |" in shown
    assert "SOLUTION" not in exercise.stub + str(exercise.solution())
    assert " 1 limits" not in repr(exercise)


# ---- lab 00 --------------------------------------------------------------------------------------
def of(count):
    """The states of as many parameters as ``count`` finds in a model."""
    return lambda model, recipe: {state: count(model) * size for state, size in recipe.items()}


def held(rule):
    """Devices by a rule for the bytes of all states and the GB of a device."""
    return lambda model, recipe, gb: rule(sum(states(model, recipe).values()), gb)


class Speechless(RuntimeError):
    """An error that has no text, that equals nothing, and that has no repr."""

    def __str__(self):
        raise KeyError

    __repr__ = __str__

    def __eq__(self, other):
        raise KeyError


STATES = [  # answer, a limit it breaks, words of the verdict
    (of(lambda m: m.num_params + m.tied * m.vocab * m.hidden), "tied output matrix",
     "count it once"),
    (of(lambda m: m.num_params - (not m.tied) * m.vocab * m.hidden), "untied output matrix",
     "a tensor of its own"),
    (of(lambda m: 12 * m.layers * m.hidden**2), "large models", "12 l h²"),
    (of(lambda m: m.num_params / 1e9), "large models", "required: bytes"),
    (lambda m, recipe: dict.fromkeys(recipe, m.num_params * 16 / len(recipe)), "large models",
     "'parameters': required: 497.759 MB, yours 663.679 MB"),
    (lambda *asked: None, "tied output matrix", "required: a dict, {name: bytes}, yours is None"),
]  # fmt: skip
DEVICES = [
    (held(lambda total, gb: math.ceil(total / (gb * 2**30))), "GiB"),
    (held(lambda total, gb: math.ceil(total / (gb * 10**9)) * (1 + 1e-12)),
     "yours 4.000000000004 devices"),
    (held(lambda total, gb: total // (gb * 10**9)), "rounded, but not up"),
    (held(lambda total, gb: total / (gb * 10**9)), "only whole devices"),
    (lambda m, recipe, gb: math.ceil(m.num_params * recipe["parameters"] / (gb * 10**9)),
     "yours 1 device (that is for the weights alone"),
    (lambda model, recipe, memory_gb: "many", "a number of devices"),
    (held(lambda total, gb: int(total // (gb * 10**9)) + 1), "the states fit exactly"),
    (lambda *asked: 10**5000, "required: a number of devices, yours is"),
    (lambda *asked: Speechless(), "<Speechless without a repr: KeyError>"),
    (lambda *asked: [0] * 10**6, "more than 20,000 entries; legal: "),
]  # fmt: skip


def spoils(model, recipe):
    """A right answer that empties the recipe, which the next question states again."""
    held = states(model, recipe)
    recipe.clear()
    return held


MODEL_STATES = pl.exercises.model_states
TABLE = Table(
    MODEL_STATES,
    [
        *(((answer, devices), {limit}, words) for answer, limit, words in STATES),
        *(((states, answer), {"devices"}, words) for answer, words in DEVICES),
    ],
    [(states, lambda *asked: Fraction(devices(*asked))), (spoils, devices)],
)
test_wrong_states_are_refused, test_right_states_pass, test_their_stub = TABLE.tests()


def test_an_answer_that_does_not_come_back_is_a_verdict():
    verdict = MODEL_STATES.check(lambda *asked: max(itertools.count()), devices, timeout=1)
    said = "no rank makes progress any more: rank 0 is at line "
    assert not verdict and said in verdict.said, repr(verdict)


@pytest.mark.parametrize("raised, said", [
    (Speechless(), "raised Speechless: <its message cannot be shown>, line "),
    (SystemExit(Speechless()), "called sys.exit(<Speechless without a repr: KeyError>), line "),
    (SystemExit(10**5000), "called sys.exit(<int without a repr: ValueError>), line "),
], ids=["error", "exit", "status"])  # fmt: skip
def test_an_error_that_says_nothing_of_itself_is_an_answers_mistake_too(raised, said):
    def answer():
        raise raised from Speechless()

    assert attempt(answer)[1].startswith(said)


def test_a_number_that_is_off_by_rounding_is_no_multiple():
    said = wrong_number(3 * (1 + 1e-12), 3, (), "{:g}".format)
    assert said.startswith("required: 3, yours 3.00000000000") and "times" not in said


WRAPS = """
from paralab.exercises.answers import accumulate as shown
def accumulate(*given, **settings):
    return shown.accumulate(*given, **settings)
"""


def test_an_answer_that_is_made_of_the_one_that_is_shown_is_refused():
    class Mine(MyZero1):
        pass

    for name, answer, how in (
        ("zero_step", Mine, "extends a class of the library; required: one that you have written"),
        ("accumulate", defined(WRAPS, "accumulate"), "calls an answer of the library; required"),
    ):
        verdict = pl.exercises.ALL[name].check(answer)
        assert not verdict and how in verdict.said


# ---- verdicts ------------------------------------------------------------------------------------
def test_of_several_looks_at_one_limit_the_first_failure_stands():
    notes = Notes("x", {"bytes": "few", "time": "short"})
    notes.note("bytes", "n=2: 10", True)
    notes.note("bytes", "n=3: 99", False, "n=3 sends 99")
    notes.note("bytes", "n=4: 10", True)
    verdict = notes.verdict()
    assert [(row.yours, row.word) for row in verdict.rows] == [("n=3: 99", "no"), ("", "-")]
    assert repr(verdict) == "x: not yet, 0 of 1 limit kept, 1 not looked at: n=3 sends 99"
    with pytest.raises(KeyError):
        notes.note("beauty", "much", True)


def test_an_answer_has_broken_none_of_no_limits():
    notes = Notes("x", {"bytes": "few"})
    notes.look("bytes", "many", "")
    assert notes.broke() and notes.broke(("bytes",)) and not notes.broke(())


def test_a_verdict_shows_what_it_quotes_as_text():
    notes = Notes("x", {"a<b": "<b>"})
    notes.note("a<b", "<script>", False)
    shown = notes.verdict()._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "not yet" in shown


def test_an_interrupt_is_the_users_and_not_a_wrong_answer():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
    value, trouble = attempt(lambda: 1 / 0)
    assert value is None and trouble.startswith("raised ZeroDivisionError: division by zero, line ")


@pytest.mark.parametrize("clinic", [pl.exercises.deadlock_clinic, pl.exercises.memory_clinic])
def test_a_dict_that_leaves_python_is_a_verdict(clinic):
    class Leaves(dict):
        def items(self):
            raise SystemExit(0)

    verdict = clinic.check(Leaves(one=1))
    assert not verdict and "called sys.exit(0)" in verdict.said


def test_an_interrupted_check_shows_where_it_was_called_and_nothing_of_the_checker():
    def checker(_):
        raise KeyboardInterrupt("interrupted; rank 0: line 7")

    one = Exercise(name="x", required={"x": "y"}, takes=(Takes(kind="a dict"),), checker=checker)
    with pytest.raises(KeyboardInterrupt, match="^interrupted; rank 0: line 7$") as found:
        one.check({})
    _, *ours = (frame.f_code for frame, _ in traceback.walk_tb(found.value.__traceback__))
    assert [code.co_name for code in ours] == ["check", "check_each"]
    assert all("__tracebackhide__" in code.co_varnames for code in ours)


# ---- sources -------------------------------------------------------------------------------------
MARKED = """\
def f(n):
    before = n
    ### BEGIN SOLUTION
    ### STUB: left = None  # what is it?
    ### STUB: return left
    secret = 2 * n
    return secret
    ### END SOLUTION


### BEGIN SOLUTION
g = 1
### END SOLUTION"""


def test_one_text_is_read_as_stub_and_as_solution():
    assert sources.student(MARKED) == (
        "def f(n):\n    before = n\n    left = None  # what is it?\n    return left\n\n\n"
        'raise NotImplementedError("your turn")'
    )
    assert sources.solution(MARKED) == (
        "def f(n):\n    before = n\n    secret = 2 * n\n    return secret\n\n\ng = 1"
    )


def test_an_answer_stands_once_and_is_inserted_where_its_name_is():
    text = "import math\n### ANSWER: own_schedule\n\n\ncheck(my_schedule)"
    for read, shown in ((marks.student, OWN.stub), (marks.solution, str(OWN.solution()))):
        assert read(text) == f"import math\n{shown}\n\n\ncheck(my_schedule)"


@pytest.mark.parametrize("text, line", [
    ("### BEGIN SOLUTION\nx = 1", 1),
    ("x = 1\n### END SOLUTION", 2),
    ("### BEGIN SOLUTION\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION", 2),
    ("### BEGIN SOLUTION\n### STUB: x\nx = 1\n### END SOLUTION\n\n### END SOLUTION", 6),
    ("### STUB: x", 1),
    ("# BEGIN SOLUTION\n# END SOLUTION", 1),
    ("### BEGIN SOLUTIONS\nx\n### END SOLUTION", 1),
    ("### answer: summa", 1),
    ("### BEGIN SOLUTION\n### STUB: y\n### Stub: x\n### END SOLUTION", 3),
])  # fmt: skip
def test_a_stray_mark_is_an_error_not_a_leaked_solution(text, line):
    said = rf"line {line}, '#.*a marker that is misplaced or misspelled; legal: "
    for read in (marks.student, marks.solution):
        refuses(said, read, text)


def test_an_answer_that_no_file_has_is_an_error():
    for read in (marks.student, marks.solution):
        refuses("no such answer; legal: accumulate, ", read, "### ANSWER: nosuch\nx = 1")


# ---- guesses -------------------------------------------------------------------------------------
def asked(**settings):
    return pl.exercises.guess("MB per rank?", **{"low": 0, "high": 10, "unit": "MB", **settings})


def test_a_guess_is_committed_once_and_stands():
    guess = asked()
    assert repr(guess) == "MB per rank? (not committed yet)\n  from 0.0 MB to 10.0 MB"
    assert repr(guess.commit(3.4)) == "committed: 3.4 MB"
    assert "committed to 3.4 MB already" in repr(guess.commit(5)) and guess.value == 3.4
    assert repr(guess) == "MB per rank? (committed to 3.4 MB)\n  from 0.0 MB to 10.0 MB"
    assert repr(guess.reveal(1.7)) == "you said 3.4 MB, it is 1.7 MB: your guess is 2.00 times that"
    assert repr(guess.reveal(3.4000001)).endswith(": exactly right")
    assert repr(guess.reveal(0)) == "you said 3.4 MB, it is 0.0 MB: 3.4 MB apart"


def test_a_reveal_without_a_guess_is_kind_and_ends_the_guessing():
    guess = asked()
    assert repr(guess.reveal(6.3)) == "it is 6.3 MB"
    assert "answer has been shown" in repr(guess.commit(6.3)) and guess.value is None


def test_what_cannot_be_asked_or_committed_is_refused_and_commits_to_nothing():
    for settings in ({"low": 10}, {"low": "few"}, {"high": float("nan")}, {"decimals": 1.5}):
        refuses("(low|high|decimals)=.*; legal: ", asked, **settings)
    guess = asked()
    for value in (11, -0.1, "much", None, float("nan")):
        refuses("value=.*legal: ", guess.commit, value)
    assert guess.value is None


def test_slider_and_button_commit_like_the_call():
    def parts(guess):
        _, row, said = guess._box.children
        slider, _, button = row.children
        return slider, button, said

    guess = asked()
    bundle = guess._repr_mimebundle_()
    assert bundle["text/plain"] == repr(guess)
    assert "application/vnd.jupyter.widget-view+json" in bundle
    slider, button, said = parts(guess)
    assert (slider.value, slider.min, slider.max) == (0, 0, 10)
    slider.value = 7.5
    button.click()
    assert guess.value == 7.5 and slider.disabled and button.disabled
    assert said.value == "committed: 7.5 MB"
    by_call = asked()
    by_call._repr_mimebundle_(), by_call.commit(1.0)
    assert parts(by_call)[0].value == 1.0 and parts(by_call)[1].disabled


# ---- one of a few explanations -------------------------------------------------------------------
def why():
    return pl.exercises.choose("Why is it slow?", ["the network", "the processor"])


def test_an_option_is_picked_once_and_the_answer_says_whether_it_was_right():
    choice = why()
    assert repr(choice).splitlines()[0] == "Why is it slow? (nothing picked yet)"
    assert repr(choice.pick(1)) == "picked 1: the network"
    assert "picked 1 already" in repr(choice.pick(2)) and choice.value == 1
    assert repr(choice.reveal(2, "Cores are few.")) == (
        "You picked 1. The answer is 2, the processor. Cores are few."
    )
    assert "that is right: the network" in repr(choice.reveal(1))


def test_an_answer_without_a_pick_says_it_and_ends_the_choosing():
    choice = why()
    assert repr(choice.reveal(2)) == "The answer is 2, the processor."
    assert "answer has been shown" in repr(choice.pick(1)) and choice.value is None


def test_the_buttons_pick_and_then_show_what_was_picked():
    choice = why()
    shown = choice._repr_mimebundle_()
    assert shown["text/plain"] == repr(choice)
    *rows, said = choice._box.children[1:]
    first, second = (row.children[0] for row in rows)
    second.click()
    assert choice.value == 2 and first.disabled and second.button_style == "primary"
    assert said.value == "picked 2"
    late = why()
    late._repr_mimebundle_(), late.reveal(1)
    assert "run the question's cell again to choose again" in late._box.children[-1].value


def test_a_choice_needs_two_options_and_a_pick_is_one_of_them():
    for options in ((), ["one"], ["same", "same"], "words"):
        refuses(f"options=.{repr(options)[1:-1]}.: nothing", pl.exercises.choose, "which?", options)
    for number in (0, 3, "1", 1.5):
        refuses("legal: ", why().pick, number)
