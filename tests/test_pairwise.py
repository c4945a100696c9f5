"""The list of composed plans is what it says: legal, short, and every pair that can be is in it."""

import itertools
import random

import pairwise
from pairwise import MAX_RANKS, SETTINGS, at_work, cover, each_value, pairs, refusal


def test_the_list_is_legal_small_and_uses_every_value():
    cases = cover().cases
    assert 40 <= len(cases) <= 60
    assert max(one.plan.world_size for one in cases) == MAX_RANKS
    assert len({one.name for one in cases}) == len(cases)
    for one in cases:
        one.plan.validate(one.model)


def test_the_few_have_every_value():
    named = {pairwise.case(values).name: values for values in pairwise.chosen()}
    few = {one for case in each_value() for one in at_work(named[case.name])}
    assert few == {one for values in named.values() for one in at_work(values)}
    assert len(each_value()) <= 10


def test_every_pair_is_in_a_plan_or_on_the_list_of_those_that_cannot_be():
    met = {pair for values in pairwise.chosen() for pair in pairs(values)}
    for (a, some), (b, others) in itertools.combinations(SETTINGS.items(), 2):
        for pair in (((a, x), (b, y)) for x in some for y in others):
            assert (pair in met) != (pair in cover().impossible), pair
    assert all(cover().impossible.values())


def test_no_legal_plan_drawn_at_random_has_a_pair_that_cannot_be():
    """The search follows what refusals say; this one does not."""
    draw, legal, never = random.Random(1), 0, cover().impossible
    for _ in range(8_000):
        values = {name: draw.choice(options) for name, options in SETTINGS.items()}
        plain = draw.sample(list(SETTINGS), draw.randrange(len(SETTINGS)))
        values.update({name: pairwise.PLAIN[name] for name in plain})
        if not refusal(values):
            legal += 1
            assert not [pair for pair in pairs(values) if pair in never]
    assert legal > 200
