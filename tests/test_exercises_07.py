"""Lab 07's exercises: right answers pass, wrong ones are refused by the limits they break."""

from __future__ import annotations

import numpy as np
import pytest

import bad_answers_07 as bad
import paralab as pl
from judged import assert_reads_the_same_alone, judged, missed
from paralab.exercises import diagnose, pairs, sources, vocab_loss

F_G, MLP, ATTENTION, LOSS = "f_and_g", "tensor_mlp", "tensor_attention", "vocab_parallel_loss"
EXERCISE = pl.exercises.ALL
FORWARD, BACKWARD, WEIGHTS = "bytes, forward", "bytes, backward", "weights per rank"
OWN_TERM = "; it is the rank's own term of the sum, to which no other was added"
WRONG = {  # exercise: [(answer, limits it breaks, words of the verdict)]
    F_G: [
        ((bad.g, bad.f), {"result", "gradients"},
         "; the input was summed over the ranks, and the result was not"),
        ((bad.same, bad.g), {"gradients", BACKWARD}, OWN_TERM),
        ((bad.f, bad.same), {"result", FORWARD}, OWN_TERM),
        ((bad.f, bad.g_sums_both_ways), {"gradients", BACKWARD}, "it is 2 times what is required"),
        ((bad.f_sums_both_ways, bad.g), {"result", "gradients", FORWARD},
         "; the input was summed over the ranks before the layer"),
        ((bad.f_averages, bad.g), {"gradients"}, "the input's gradient, element (0, 0, 0): "),
        ((bad.f_averages, bad.g), {"gradients"}, "; it is 0.5 times what is required"),
        ((bad.f, bad.g_gathers), {FORWARD}, "t=3: rank 0 sends 18,432 bytes in forward, required: "
         "12,288, 1.5 times as many"),
        ((bad.f, bad.g_takes_the_largest), {"result"}, "; it is the largest of the ranks' terms"),
        ((bad.f, bad.g_without_backward), {"result"}, "required: a tensor, this is a NoneType"),
        ((bad.f, bad.g_does_not_wait), {"result"}, "rank 0 never waits for all_reduce #0"),
        ((bad.f, bad.g_returns_nothing), {"result"}, "rank 0 raised TypeError: unsupported"),
        ((bad.f, bad.g_on_rank_0), {"result"}, "t=2: "),
        ((bad.f,), {"result"}, "f alone is no answer: give both, check(f, g)"),
        ((bad.f, "g"), {"result"}, "required: a function g, yours is 'g'"),
    ],
    MLP: [
        (bad.MLPAddsNothing, {"result", FORWARD}, OWN_TERM),
        (bad.MLPNoF, {"gradients", BACKWARD}, OWN_TERM),
        (bad.MLPSwapped, {"result", "gradients"}, "; the input was summed over the ranks, and"),
        (bad.MLPBiasEverywhere, {"result"}, "; down.bias is in it 2 times"),
        (bad.MLPBiasOfRank0, {"gradients"}, "rank 1: the gradient of down.bias, element 0: 0, "),
        (bad.MLPExactGelu, {"result", "gradients"}, "; GELU is not in its tanh form"),
        (bad.MLPRelu, {"result", "gradients"}, "t=2: rank 0: the result, element (0, 0, 0): "),
        (bad.MLPSumsInside, {"result", "gradients", FORWARD}, "required: 9,216, 3.5 times as"),
        (bad.MLPKeepsAll, {WEIGHTS}, "t=2: rank 0 holds 138,912 bytes of weights, its part is 46,"),
        (bad.MLPKeepsViews, {WEIGHTS}, "t=2: rank 0 holds 93,312 bytes of weights"),
        (bad.MLPNumpy, {WEIGHTS}, "t=2: rank 0 holds 138,"),
        (bad.MLPOthersPart, {"gradients"}, "gradient of down.weight, element (0, 0): "),
        (bad.MLPOthersPart, {"gradients"}, "; it is rank 1's part"),
        (bad.MLPWholeLayers, {"gradients", FORWARD, WEIGHTS}, "it is 2 times what is required"),
        (bad.MLPOtherNames, {"result"}, "it has no parameter up.weight; it has down.weight, "),
        (bad.MLPFrozen, {"result"}, "up.bias has no gradient after backward"),
        (bad.MLPRaises, {"result"}, "t=2: rank 0 raised KeyError: 'A'"),
        (bad.mlp_of_two, {"result"}, "yours cannot be called so: got an unexpected keyword"),
        ("mlp", {"result"}, "required: a class, yours is 'mlp'"),
    ],
    ATTENTION: [
        (bad.AttentionContiguous, {"result", "gradients"},
         "; each rank has a contiguous t-th of qkv: queries of some heads and keys of others"),
        (bad.AttentionByHead, {"gradients"}, "; its rows are in the order of heads, not queries"),
        (bad.AttentionScaledByAll, {"result", "gradients"}, "divided by the root of h, required: "),
        (bad.AttentionScaledByOwn, {"result", "gradients"}, "divided by the root of h/t, required"),
        (bad.AttentionSeesAll, {"result", "gradients"}, "; every token sees those after it"),
        (bad.AttentionSeesTheNext, {"result", "gradients"}, "; every token sees the one after it"),
        (bad.AttentionBiasEverywhere, {"result"}, "; proj.bias is in it 2 times"),
        (bad.AttentionAddsNothing, {"result", FORWARD}, OWN_TERM),
        (bad.AttentionNoF, {"gradients", BACKWARD}, OWN_TERM),
        (bad.AttentionGathersHeads, {FORWARD}, "13,824 bytes in forward, required: 9,216, 1.5 ti"),
        (bad.AttentionTwoAllReduces, {"result", "gradients", FORWARD}, "required: 9,216, 1.5 tim"),
        (bad.AttentionKeepsViews, {WEIGHTS}, "rank 0 holds 23,520 bytes of weights, its part is 1"),
        (bad.AttentionKeepsAll, {WEIGHTS}, "t=2: rank 0 holds 47,136 bytes of weights"),
        (bad.AttentionNoWait, {"result"}, "t=2: rank 0 never waits for all_reduce #0"),
        (bad.AttentionRaises, {"result"}, "t=2: rank 0 raised KeyError: 'q'"),
        (bad.MLPGood, {"result"}, "got an unexpected keyword argument 'heads'"),
    ],
    LOSS: [
        (bad.loss_overflows, {"loss", "gradient"}, "exp overflows without the maximum"),
        (bad.loss_of_own_largest, {"loss", "gradient"}, "subtracts the maximum of its own part"),
        (bad.loss_of_own_sum, {"loss", "gradient"}, "sums of exp were not added over the ranks"),
        (bad.loss_of_own_part, {"loss", "gradient"}, "t=2: rank 0: the loss, element 0: "),
        (bad.loss_target_everywhere, {"loss", "gradient"}, "ranks without the target contribute"),
        (bad.loss_target_of_one_rank, {"loss"}, "the target's logit is missing on ranks"),
        (bad.loss_is_a_sum, {"loss", "gradient"}, "; it is 96 times what is required"),
        (bad.loss_of_a_mean_over_ranks, {"loss", "gradient"}, "; it is 0.5 times what is"),
        (bad.loss_gathers_the_logits, {FORWARD, "memory"}, "sends 98,304 bytes in forward, "),
        (bad.loss_of_sums_both_ways, {"gradient", BACKWARD}, "; it is 2 times what is required"),
        (bad.loss_in_many_copies, {"memory"}, "bytes in addition to its logits, which are 98,304"),
        (bad.loss_has_no_gradient, {"loss"}, "element 0 of tensors does not require grad"),
        (bad.loss_does_not_wait, {"loss"}, "t=2: rank 0 never waits for all_reduce #1"),
        (bad.loss_indexes_by_the_whole, {"loss"}, "is out of bounds for dimension 1 with size 256"),
        (bad.loss_subtracts_everywhere, {"gradient"}, "; 1 is subtracted on ranks too that do not"),
        (bad.loss_subtracts_nothing, {"gradient"}, "from which no target is subtracted"),
        (bad.loss_ignores_grad, {"gradient"}, "; it is 0.333 times what is required"),
        (bad.loss_forgets_the_mean, {"gradient"}, "; it is 96 times what is required"),
    ],
}  # fmt: skip
NAMES = {F_G: ("f", "g"), MLP: ("MyMLP",), ATTENTION: ("MyAttention",), LOSS: (LOSS,)}


def stored(exercise, suffix=""):
    """The parts of the answer in answers/NAME.py, or of the other one."""
    names = {"__name__": "__main__"}
    exec(sources.solution(sources.answer(exercise + suffix)), names)
    return tuple(names[name] for name in NAMES[exercise])


RIGHT = {
    F_G: [(bad.f, bad.g), (bad.f_in_two, bad.g_in_two)],
    MLP: [bad.MLPGood],
    ATTENTION: [bad.AttentionGood, bad.AttentionHeadByHead],
    LOSS: [bad.loss_by_autograd, bad.loss_of_log_sums, bad.loss_by_hand],
}
for one in RIGHT:
    RIGHT[one] += [stored(one), stored(one, "_other")]
TABLE = {e: [*{id(row[0]): row[0] for row in rows}.values(), *RIGHT[e]]
         for e, rows in WRONG.items()}  # fmt: skip
ALONE = [WRONG[F_G][12][0]]


@pytest.mark.parametrize(
    "exercise, answer, limits, words",
    [(exercise, *row) for exercise, rows in WRONG.items() for row in rows],
)
def test_a_wrong_answer_is_refused_by_the_limits_it_breaks(exercise, answer, limits, words):
    verdict = judged(EXERCISE[exercise], answer, TABLE[exercise], alone=ALONE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize(
    "exercise, answer", [(exercise, one) for exercise, some in RIGHT.items() for one in some]
)
def test_a_right_answer_passes(exercise, answer):
    verdict = judged(EXERCISE[exercise], answer, TABLE[exercise], alone=ALONE)
    assert verdict.passed, repr(verdict)


def test_a_multiple_is_named_although_its_rounding_is_as_many_times_larger():
    right = np.linspace(0.5, 1, 8)
    off = diagnose.TOLERANCE * np.resize([1, -1], 8)  # of what is right: not wrong by itself
    said = diagnose.first_wrong("the gradient", [96 * (right + off)], [right])
    assert said.endswith("; it is 96 times what is required")


def test_two_verdicts_on_one_answer_are_the_same():
    judged(EXERCISE[MLP], bad.MLPKeepsViews, TABLE[MLP], alone=ALONE)
    assert_reads_the_same_alone(EXERCISE[MLP], bad.MLPKeepsViews, TABLE[MLP])


@pytest.mark.parametrize("kind", pairs.PAIRS)
def test_the_whole_layer_is_what_autograd_makes_of_the_reference_gpt_s(kind):
    """The checker's own reference against torch."""
    import torch

    spec = pl.ModelSpec(layers=1, hidden=pairs.HIDDEN, heads=pairs.HEADS, seq_len=pairs.SEQ)
    whole = getattr(pl.reference.GPT(spec).blocks[0], kind).double()
    if kind == "mlp":
        whole.up, whole.down = (
            torch.nn.Linear(*sizes).double() for sizes in ((48, 240), (240, 48))
        )
    given = {n: torch.from_numpy(v).double() for n, v in pairs.given(pairs.PAIRS[kind], 7).items()}
    x = given["x"].requires_grad_()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(given[name])
    z = whole(x)
    z.backward(given["grad"])
    found = {"z": z.detach(), "x": x.grad, **{n: p.grad for n, p in whole.named_parameters()}}
    right = pairs.of_one_device(pairs.PAIRS[kind], 7)
    assert found.keys() == right.keys()
    for name, value in found.items():
        np.testing.assert_allclose(right[name], value.numpy(), atol=1e-10)


@pytest.mark.parametrize("kind", pairs.PAIRS)
@pytest.mark.parametrize("t", (2, 3, 4))
def test_the_terms_of_all_ranks_are_the_sum(kind, t):
    pair = pairs.PAIRS[kind]
    right, last = pairs.of_one_device(pair, 7), list(pair.shapes)[-1]
    z, x = (sum(pairs.terms(pair, 7, t, name)) for name in ("z", "x"))
    np.testing.assert_allclose(z + pairs.given(pair, 7)[last], right["z"], atol=1e-5)
    np.testing.assert_allclose(x, right["x"], atol=1e-10)


def test_the_whole_loss_is_torch_s():
    import torch

    logits, targets = vocab_loss.given(7)
    z = torch.from_numpy(logits).double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(z, torch.from_numpy(targets))
    loss.backward()
    right = vocab_loss.of_one_device(logits, targets)
    np.testing.assert_allclose(right[0], [loss.item()], atol=1e-10)
    np.testing.assert_allclose(right[1], z.grad.numpy(), atol=1e-12)


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match="timeout=0.*legal"):
        EXERCISE[MLP].check(bad.MLPGood, timeout=0)
