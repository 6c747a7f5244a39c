"""Does the tuner find the optimum in a fifth of the time of an exhaustive search, and are its promises true?

The machines are synthetic and run in virtual time, so the truth is known: t(n) = a + b*n, instances that slow each
other down, three precisions that may or may not pay, and an SLO from tight to loose, all drawn anew for each seed. The
space has 6 batch sizes, 5 numbers of instances and 3 precisions. The exhaustive search finds a rate for each of the 90
settings without a batch curve, then proves the best as usual. The true rate of settings comes from long runs (60,000
requests), to 1 %. The true optimum is the best of the exhaustive search's top six and the other searches' choices.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import harness
from report import KEPT_ROUNDS

from penstock.perf.tune.space import parse_settings, parse_space
from penstock.perf.tune.tuner import tune

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.synthetic import SyntheticSystem, drawn

SPACE = parse_space("batch=1..32,instances=1..16,precision=fp32,fp16,bf16")
DEFAULT = parse_settings("batch=32,instances=1,precision=fp32")
SEARCHES = ("auto", "climb", "halving", "tpe")
SEEDS_A_ROUND = 2
CANDIDATES = 6  # of the exhaustive search, for the true optimum


def one_seed(seed: int, searches: Sequence[str]) -> dict[str, Any]:
    """The result of each search on the machine of this seed, and the truth."""
    machine, slo = drawn(seed)
    limit_s = slo.latency_s
    assert limit_s is not None
    begin = time.perf_counter()
    found, candidates = {}, {}
    for search in ("grid", *searches):
        system = SyntheticSystem(machine, slo, has_curve=search != "grid")
        outcome = tune(system, SPACE, slo, search=search, default=DEFAULT, seed=seed)
        assert outcome.chosen is not None, f"seed {seed}: {search} finds no settings within {slo.text}"
        found[search] = outcome
        sustained = {s.settings: s.goodput for s in outcome.verdict.trajectory if s.goodput}
        top = sorted(sustained, key=sustained.__getitem__)[-CANDIDATES:] if search == "grid" else []
        candidates |= {text: sustained[text] for text in top} | {outcome.chosen.text: outcome.rate}
    best = SyntheticSystem(machine, slo)
    rates = {text: best.true_rate(parse_settings(text), rate) for text, rate in candidates.items()}
    truth = max(rates.values())
    result: dict[str, Any] = {"seed": seed, "slo": slo.text, "truth": truth, "best": max(rates, key=rates.__getitem__)}
    for search, outcome in found.items():
        chosen = outcome.chosen
        assert chosen is not None
        result[search] = {
            "chosen": chosen.text,
            "goodput": rates[chosen.text] / truth,
            "promised": outcome.rate / truth,
            "p99": best.true_p99_s(chosen, outcome.rate) / limit_s,
            "time": outcome.spent_s / found["grid"].spent_s,
            "measured_s": outcome.spent_s,
        }
    return result | {"seconds": time.perf_counter() - begin}


def main() -> None:
    options = harness.options(
        __doc__,
        seconds=None,
        first={"type": int, "default": 0, "help": "first seed; only 0 keeps the results"},
        searches={"default": ",".join(SEARCHES), "help": "only all of them keep the results"},
    )
    searches = options.searches.split(",")
    seeds = SEEDS_A_ROUND * options.rounds
    drawn_from = range(options.first, options.first + seeds)
    method = f"Seeds {drawn_from[0]} to {drawn_from[-1]}. All times except the seconds after a seed are virtual."
    report = harness.Report(__file__, __doc__, options, {}, libraries=["optuna"], method=method)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = []
        for result in pool.map(partial(one_seed, searches=searches), drawn_from):
            results.append(result)
            summary = {k: v for k, v in result.items() if k not in searches}
            print(summary, result[searches[0]], sep="\n", flush=True)
    for search in (*searches, "grid"):
        header = [
            "seed",
            "SLO",
            "chosen",
            "truly best",
            "its true rate",
            "goodput of chosen",
            "promised",
            "p99 / SLO",
            "time",
        ]
        rows = []
        for r in results:
            it = r[search]
            row = [str(r["seed"]), r["slo"], it["chosen"], r["best"], f"{r['truth']:.4g}/s"]
            row += [f"{it['goodput']:.1%}", f"{it['promised']:.1%}", f"{it['p99']:.2f}"]
            rows.append([*row, f"{it['time']:.1%} of {r['grid']['measured_s']:,.0f} s"])
        report.table(f"search: {search}", header, rows)
    for search in searches:
        all_of = [r[search] for r in results]
        able = sum(it["goodput"] >= 0.95 and it["time"] <= 0.2 for it in all_of)
        need = round(0.9 * seeds) if search == "auto" else None
        what = f"{search}: seeds with 95 % of the best goodput in 20 % of the time, out of {seeds}"
        report.target(what, [able], least=0 if need is None else need)
        report.target(f"{search}: largest true p99 / SLO", [max(it["p99"] for it in all_of)], most=1.05)
        print(f"{search}: median time {statistics.median(it['time'] for it in all_of):.1%}")
    whole = options.rounds >= KEPT_ROUNDS and options.first == 0 and searches == list(SEARCHES)
    report.save(whole=whole)


if __name__ == "__main__":
    main()
