"""Lab 07's exercises: right answers pass, wrong ones are refused by the limits they break."""

import numpy as np
import pytest

import paralab as pl
from judged import Table, altered
from paralab.exercises import diagnose, pairs, tensor
from paralab.exercises.tries import Outcome

F_G, MLP, ATTENTION, LOSS = "f_and_g", "tensor_mlp", "tensor_attention", "vocab_parallel_loss"
EXERCISE = pl.exercises.ALL
FORWARD, BACKWARD, WEIGHTS = "bytes, forward", "bytes, backward", "weights per rank"
OWN_TERM = "; it is the rank's own term of the sum, to which no other was added"
mlp = altered("tensor_mlp")
attention = altered("tensor_attention")
pair = altered("f_and_g")
CLONE = "clone(memory_format=torch.contiguous_format)"
loss = altered(LOSS)
SUM, SUM_BACK = "dist.all_reduce(x)", "dist.all_reduce(grad)"
F_ALONE = pair()[0]
LARGEST, BOTH = "largest = logits.max(dim=1).values", "dist.all_reduce(sums)"
SAVED = "share, local, here = ctx.saved_tensors"
LINEAR = "F.linear(inside, self.down.weight)"
INSIDE = 'F.gelu(self.up(self.f(x)), approximate="tanh")'
NO_GRAD = "with torch.no_grad():"
WEIGHT = "qkv.weight.view(3, h, h)[:, own].flatten(0, 1)"
BIAS = "qkv.bias.view(3, h)[:, own].flatten()"
HEADS = "[:, rank * self.heads : (rank + 1) * self.heads].transpose(0, 1)"
SHARE = "scores.masked_fill(future, -math.inf).softmax(-1)"
USES = "; the gradient of another use of x, as in x + mlp(x), is summed too: f has to return"
HOOKED = """def hooked(x):
    x.requires_grad and x.register_hook(Sum.apply)
    return x
"""
GATHERS = """def vocab_parallel_loss(logits, targets):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return torch.nn.functional.cross_entropy(torch.cat(parts, 1), targets)
"""
WRONG = {  # exercise: [(answer, limits it breaks, words of the verdict)]
    F_G: [
        (pair((SUM_BACK, "pass")), {"gradients", BACKWARD}, OWN_TERM),
        (pair((SUM, "pass")), {"result", FORWARD}, OWN_TERM),
        (pair(("f, g =", "Copy.forward = staticmethod(Sum.forward)\nf, g =")),
         {"result", "gradients", FORWARD},
         "; the input was summed over the ranks before the layer"),
        (pair((f"grad = grad.{CLONE}", "pass")),
         {"gradients"}, "t=2: f changes the gradient that arrives, which autograd may still need"),
        (pair((f" x = x.{CLONE}", " pass")), {"result"}, "t=2: g changes its argument, which"),
        (pair((SUM, "every = x.new_empty(dist.get_world_size() * x.numel())\n        "
               "dist.all_gather_into_tensor(every, x.contiguous().view(-1))\n"
               "        x = every.view(-1, *x.shape).sum(0)")), {FORWARD},
         "t=3: rank 0 sends 18,432 bytes in forward, required: 12,288 (yours is 1.5 times that)"),
        (pair(("Sum.apply", "lambda x: Sum.apply(x).detach()")), {"result"},
         "up.weight has no gradient after backward"),
        (pair(("f, g = Copy.apply", f"{HOOKED}f, g = hooked")), {"gradients"}, USES),
        ((F_ALONE,), {"result"}, "g is missing: give both, check(f, g)"),
        (pair(("Copy.apply, Sum.apply", "Copy, Sum")), {"result"},
         "required: a function f, yours is the class Copy: give Copy.apply"),
    ],
    MLP: [
        (mlp((f"self.g({LINEAR})", LINEAR)), {"result", FORWARD}, OWN_TERM),
        (mlp(("self.f(x)", "x")), {"gradients", BACKWARD}, OWN_TERM),
        (mlp(("self.f(x)", "x"), ("linear(inside", "linear(self.f(inside)")),
         {"gradients"}, "; f is applied to the input of down, but it belongs on x"),
        (mlp((f"self.g({LINEAR}) + self.down.bias", "self.g(self.down(inside))")),
         {"result"}, "; the term down.bias is in it twice"),
        (mlp((f"self.g({LINEAR}) + ",
              f"self.g({LINEAR} + self.down.bias * (dist.get_rank() == 0)) + 0 * ")),
         {"gradients"}, "rank 1: the gradient of down.bias, element 0: 0, "),
        (mlp((INSIDE, "F.relu(self.up(self.f(x)))")), {"result", "gradients"},
         ("t=2: rank 0: the result, element (0, 0, 0): ", "; ReLU is in the place of GELU")),
        (mlp((INSIDE, "self.up(self.f(x))")), {"result", "gradients"}, "; GELU is missing"),
        (mlp(("self.up.bias.copy_(up.bias[own])", "pass")), {"result", "gradients"},
         "; rank 0: its up.bias, element 0: "),
        (mlp(("down.weight[:, own]", "down.weight[:, rank::t]")), {"result", "gradients"},
         "; columns r, r + t, ... of down.weight are on rank r, required: contiguous"),
        (mlp((NO_GRAD, f"self.whole = up.weight, down.weight\n        {NO_GRAD}")),
         {WEIGHTS}, ("t=2: rank 0 holds 138,912 bytes of weights, required: at most 48,",
                     "; its part is 46,")),
        (mlp(("weight.copy_", "weight.set_")), {WEIGHTS},
         ("t=2: rank 0 holds 92,832 bytes", "; down.weight is a slice, which keeps the whole")),
        (mlp((LINEAR, "inside"), (" + self.down.bias", "")), {"result"},
         "the result has shape (2, 24, 120), required: (2, 24, 48)"),
        (mlp(("self.up", "self.first")), {"result"},
         "no parameter up.weight; it has first.weight, "),
    ],
    ATTENTION: [
        (attention((WEIGHT, "qkv.weight.chunk(t)[rank]"), (BIAS, "qkv.bias.chunk(t)[rank]")),
         {"result", "gradients"},
         "; each rank has a contiguous t-th of qkv: queries of some heads and keys of others"),
        (attention((WEIGHT, f"qkv.weight.view(3, heads, -1, h){HEADS}.flatten(0, 2)"),
                   (BIAS, f"qkv.bias.view(3, heads, -1){HEADS}.flatten()"),
                   ("s, 3, self.heads, self", "s, self.heads, 3, self"),
                   ("permute(2, 0, 3, 1, 4)", "permute(3, 0, 2, 1, 4)")),
         {"gradients"}, "; its rows are in the order of heads, not queries"),
        (attention(("proj.weight[:, own]", "proj.weight[own].t()")), {"result", "gradients"},
         "; rank 0: its proj.weight, element (0, "),
        (attention(("scores = q", "k, v = self.past = getattr(self, 'past', (k, v))\n"
                    "        scores = q"), ("ones(s, s", "ones(s, k.shape[2]")), {"result"},
         "t=2: rank 0: the result of a second forward, of 16 of the 24 tokens, element (0, 0, 0)"),
        *((attention(("triu(1)", hidden)), {"result", "gradients"}, f"; {words}")
          for hidden, words in (
            ("triu(s)", "every token sees those after it"),
            ("tril(-1)", "each token sees itself and those after it, required: those before it"),
            ("tril()", "each token sees those after it alone, and the last sees none: a softmax"))),
        *((attention((SHARE, share)), {"result", "gradients"}, f"; {words}") for share, words in (
            (SHARE.replace("-1", "-2"), "softmax is over queries, required: over keys, the last"),
            (SHARE.replace("-1", "1"), "softmax is over heads, required: over keys, the last"),
            ("scores.softmax(-1).tril()", "tokens are hidden after softmax, required: before it"),
            (SHARE.replace("-math.inf", "0.0"), "hidden tokens have the score 0, required: -inf"))),
        (attention(("F.linear(mixed", "F.linear(self.g(mixed)")),
         {"result", "gradients", FORWARD}, "required: 9,216 (yours is 1.5 tim"),
        (attention(("self.f(x)", "x"), ("linear(mixed", "linear(self.f(mixed)")),
         {"gradients", BACKWARD}, "; f is applied to the input of proj, but it belongs on x"),
        (attention(("self.f, self.g = f, g", "self.f, self.g, self.qkvs = f, g, [qkv]")),
         {WEIGHTS}, "t=2: rank 0 holds 47,136 bytes of weights"),
    ],
    LOSS: [
        (loss((LARGEST, "largest = torch.zeros(n)")), {"loss", "gradient"},
         "exp overflows unless the maximum is subtracted first"),
        *((loss(change), {"loss", "gradient"}, f"the {one} is infinite or NaN: exp(z - m) is 0 for "
           "all logits of a token: m has to be this token's maximum, over all ranks")
          for one, change in (("loss", (", op=dist.ReduceOp.MAX", "")),
                              ("gradient", (LARGEST, "largest = logits.max().expand(n).clone()")))),
        (loss(("ReduceOp.MAX", "ReduceOp.MIN")), {"loss", "gradient"}, "exp overflows unless the "),
        (loss(("dist.all_reduce(largest, op=dist.ReduceOp.MAX)", "pass")), {"loss", "gradient"},
         "subtracts the maximum of its own part"),
        (loss((BOTH, "dist.all_reduce(sums[1])")), {"loss", "gradient"},
         "sums of exp were not added over the ranks"),
        *((loss(edge), {"loss", "gradient"}, ("t=2: rank 0: the loss, element 0: ",
           f"; it is so if each rank takes targets {taken}, required: targets 0 to 255"))
          for edge, taken in (
              ((">= 0", "> 0"), "1 to 255 of its part"),
              (("< width", "<= width"), "0 to 256 of its part"),
              (("< width", "< width - 1"), "0 to 254 of its part"))),
        *((loss(("local.clamp(0, width - 1)", read), ("[:, 0] * here", "[:, 0]"),
                ("-= here.to(share.dtype)", "-= 1")), {"loss", "gradient"},
           ("without the target contribute another logit", "1 is subtracted also on ranks that"))
          for read in ("targets % width", "local * here")),
        (loss(("local.clamp(0, width - 1)", "targets % width"),
              ("[:, 0] * here", "[:, 0] - largest"), ("(largest + sums", "(sums")), {"loss"},
         "; it is so if ranks without the target contribute another logit"),
        (loss(("target = logits.gather(1, local[:, None])[:, 0] * here",
               "target = (logits.gather(1, local[:, None])[:, 0] - largest) * here")), {"loss"},
         "; it is so if the maximum is added twice, or subtracted from the target's logit too"),
        (loss(("[:, 0] * here", "[:, 0].masked_fill(~here, -torch.inf)")), {"loss"},
         "the loss is infinite or NaN: a rank without the target adds log(0) or -inf, and"),
        (loss((".mean()", "")), {"loss"}, "the loss has 96 elements, required: one, their mean"),
        (loss((".apply", f".apply\n\n\n{GATHERS}")), {FORWARD, "memory"},
         "sends 98,304 bytes in forward, "),
        (loss((SAVED, f"{SAVED}\n        grad = grad.clone()\n        dist.all_reduce(grad)")),
         {"gradient", BACKWARD}, "; it is 2 times what is required"),
        (loss((LARGEST, f"copies = [logits.clone() for _ in range(5)]\n        {LARGEST}")),
         {"memory"}, ("bytes in addition to its logits, required: at most 496,",
                      "5 times the logits' 98,304 ")),
        (loss(("local = targets - dist.get_rank() * width",
               "targets -= dist.get_rank() * width\n        local = targets")), {"loss"},
         "it changes targets, which its caller still needs: work on a copy"),
        (loss(("(logits - largest[:, None]).exp()", "logits.sub_(largest[:, None]).exp_()")),
         {"loss"}, (", required: ", "; it changes logits, which its caller still needs: work on")),
        (loss((BOTH, "late = dist.all_reduce(sums, async_op=True)"),
              ("ctx.save_for", "late.wait()\n        ctx.save_for")), {"gradient"},
         "or with one whose result is read before its wait()"),
        (loss(("grad / n", "1 / n")), {"gradient"}, "; it is 0.333 times what is required"),
    ],
}  # fmt: skip
TABLE = {one: Table(EXERCISE[one], WRONG[one]) for one in WRONG}
test_wrong_operators_are_refused, test_right_operators_pass, test_their_stubs = TABLE[F_G].tests()
test_a_wrong_mlp_is_refused, test_a_right_mlp_passes, test_the_stub_of_an_mlp = TABLE[MLP].tests()
test_a_wrong_attention_is_refused, test_a_right_attention_passes, test_its_stub = TABLE[
    ATTENTION
].tests()
test_a_wrong_loss_is_refused, test_a_right_loss_passes, test_a_loss_stub = TABLE[LOSS].tests()


def test_what_is_right_but_for_rounding_is_no_mistake_that_was_made():
    right = np.linspace(0.5, 1, 8)
    off = 1 + 1.5 * diagnose.TOLERANCE
    said = diagnose.first_wrong("the gradient", [off * right] * 2, [right, right])
    assert said.endswith("; it is 1.00002 times what is required")


def test_a_multiple_is_named_although_its_rounding_is_as_many_times_larger():
    right = np.linspace(0.5, 1, 8)
    off = diagnose.TOLERANCE * np.resize([1, -1], 8)  # of what is right: not wrong by itself
    said = diagnose.first_wrong("the gradient", [96 * (right + off)], [right])
    assert said.endswith("; it is 96 times what is required")


def test_a_mistake_in_one_element_and_a_sum_of_some_terms_are_named():
    right = np.linspace(0.5, 1, 8)
    said = diagnose.first_wrong("the sum", [right * (np.arange(8) != 3)], [right])
    assert said.endswith("; in 1 of 8 elements it is zero")
    terms = np.random.default_rng(7).standard_normal((4, 8))
    named = [(f"of rank {rank}", term) for rank, term in enumerate(terms)]
    for got, words in (
        (terms[0] + terms[2], "only the terms of rank 0 and of rank 2 are in it"),
        (terms[:3].sum(0), "; the term of rank 3 is missing"),
        (terms.sum(0) + terms[1], "; the term of rank 1 is in it twice"),
        (
            terms[:2].sum(0) / 4 + terms[2:].sum(0),
            "; the terms of rank 0 and of rank 1 are in it 0.25 times",
        ),
        (
            np.where(np.arange(8) < 4, terms[0], terms[3]),
            "each element is one term alone, to which",
        ),
    ):
        said = diagnose.first_wrong("", [got], [terms.sum(0)], terms=lambda _: named)
        assert words in said, said


def test_a_piece_of_another_tensor_is_named_and_what_is_nearly_right_or_constant_is_not():
    draw = np.random.default_rng(7)
    wanted = {name: draw.standard_normal((5, 20)) for name in ("up", "down")}
    wanted["up"][4] = wanted["down"][0] = 0
    off = draw.standard_normal((5, 20))
    moved = np.concatenate([wanted["up"][:1], wanted["down"][1:]])  # right in its first row
    zeros, infinite = off.copy(), np.full((5, 20), np.inf)
    zeros[0] = 0
    for got, named in (
        (moved, True),
        (wanted["up"] + 1e-3 * off, False),
        (zeros, False),
        (infinite, False),
        (np.nan * off, False),
    ):
        said = diagnose.first_wrong_tensor([{"up": got, "down": wanted["down"]}], wanted)
        assert said.startswith("rank 0: up, element (")
        words = "; from there on it has elements of another place, in down"
        assert said.endswith(words) if named else "another place" not in said


def test_a_last_bias_of_which_each_rank_adds_a_part_is_not_called_wrong():
    pair = pairs.PAIRS["mlp"]
    whole = pairs.drawn(pair, 7)["down.bias"]
    for parts, named in ((1, False), (2, False), (3, True)):
        found = Outcome((), 7, None, [{"its down.bias": whole / parts}] * 2)
        assert named == bool(tensor._not_its_part(found, pair, "down.bias"))


def test_changes_of_a_few_elements_that_are_alike_by_chance_are_not_of_another_place():
    start = {"up": np.zeros((4, 20))}
    wanted, got = (start["up"].copy() for _ in "ab")
    wanted[0, 3], wanted[2, 5], got[0, 3], got[2, 5] = 1, 2, 2, 2
    said = diagnose.first_wrong_tensor([{"up": got}], {"up": wanted}, start=start)
    assert said.startswith("rank 0: up, element (0, 3): 2") and "another place" not in said


def test_terms_that_cannot_be_told_apart_or_are_too_many_are_not_named():
    term = np.linspace(0.5, 1, 8)
    for terms in ([term, 2 * term], np.random.default_rng(7).standard_normal((9, 8))):
        named = [(f"of rank {rank}", one) for rank, one in enumerate(terms)]
        said = diagnose.first_wrong("", [term * term], [sum(terms)], terms=lambda _, n=named: n)
        assert "required: " in said and "; " not in said


def test_a_factor_that_is_a_divisor_for_other_ranks_is_a_fraction():
    right = np.linspace(0.5, 1, 8)
    for factor, words in ((4 / 3, "4/3 times"), (0.75, "0.75 times"), (1e6 / 7, "1.43e+05 times")):
        said = diagnose.first_wrong("", [factor * right], [right])
        assert said.endswith(f"; it is {words} what is required")


@pytest.mark.parametrize("kind", pairs.PAIRS)
@pytest.mark.parametrize("t", (2, 3, 4))
def test_the_terms_of_all_ranks_are_the_sum(kind, t):
    pair = pairs.PAIRS[kind]
    right = pairs.of_one_device(pair, 7)
    for name in ("z", "x"):
        terms = [term for _, term in pairs.named_terms(pair, 7, t, name)]
        np.testing.assert_allclose(sum(terms), right[name], atol=1e-10)
