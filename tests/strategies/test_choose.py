"""Who is asked in a round."""

from __future__ import annotations

from strategies.choose import choose

KNOWN = [f"c{i}" for i in range(20)]


def test_a_fraction_is_that_share_and_leaves_out_who_may_not() -> None:
    chosen = choose(KNOWN, {"c3", "c4"}, fraction=0.25, seed=1, round_=1)
    assert len(chosen) == 5
    assert not {"c3", "c4"} & set(chosen)
    assert chosen == tuple(sorted(chosen))
    assert chosen == choose(reversed(KNOWN), {"c4", "c3"}, fraction=0.25, seed=1, round_=1)  # type: ignore[arg-type]
    assert choose(KNOWN, (), fraction=0.01, seed=1, round_=1)


def test_poisson_draws_each_client_by_itself() -> None:
    rounds = [choose(KNOWN, (), fraction=0.1, seed=7, round_=r, sampling="poisson") for r in range(1, 1001)]
    sizes = [len(chosen) for chosen in rounds]
    assert min(sizes) == 0  # .9**20 = 12 % of the rounds
    # binomial: mean 2, variance 1.8; 1,000 rounds have a standard error of .042
    assert abs(sum(sizes) / 1000 - 2.0) < 0.17
    assert abs(sum((s - 2.0) ** 2 for s in sizes) / 1000 - 1.8) < 0.4
    for client in KNOWN:  # 100 of 1,000 each, standard deviation 9.5
        assert 60 < sum(client in chosen for chosen in rounds) < 140
    fewer = [choose(KNOWN[:5], (), fraction=0.1, seed=7, round_=r, sampling="poisson") for r in range(1, 1001)]
    for all_, some in zip(rounds, fewer, strict=True):  # whoever else is known changes nothing
        assert [c for c in all_ if c in KNOWN[:5]] == list(some)
    everybody = choose(KNOWN, {"c1"}, fraction=1.0, seed=7, round_=1, sampling="poisson")
    assert everybody == tuple(sorted(set(KNOWN) - {"c1"}))
