"""Rates that limits keep: upper bounds, which hold on any machine, and lower bounds, which need CPU time.

A limit promises an upper bound. More than that is an error, however the machine behaves. That a load gets 95 % of a rate needs
CPU, so such a test has the mark `timed` or `paced`, and fails with `Missed`.
"""

from typing import NamedTuple

import rig as r

# A limit makes up for this time in which nothing passed.
SLACK_S = 0.05
# Requests above that: one may pass at each of two workers while there is room for one byte, and two
# workers may buy at the same time.
REQUESTS_MORE = 3
# What a load gets of a rate at least.
LEAST = 0.95


class Missed(r.Failed):
    """Less was done than wanted. A busy machine may be the reason, so `make test` runs the test again."""


def needs_cpu(condition, message):
    """Fails with `Missed` unless `condition`, which may be false on a busy machine. For tests with the mark `timed` or `paced`."""
    if not condition:
        raise Missed(message)


class Counted(NamedTuple):
    """What was counted between two looks at a counter. Each look takes a while."""

    count: int
    # From the end of the first look to the begin of the second one, and from begin to end.
    shortest_s: float
    longest_s: float

    def per_second(self):
        return self.count / self.longest_s


def during(count, seconds):
    """What a program counted within a time that it measured itself."""
    return Counted(count, seconds, seconds)


def at_most(what, found, most):
    """More than `most` fails on any machine."""
    if found > most:
        raise r.Failed(f"{what}: {found:.1f}, and {most:.1f} are allowed")


def at_least(what, found, wanted):
    """Less than 95 % of `wanted` fails. For tests with the mark `timed` or `paced`."""
    needs_cpu(found >= LEAST * wanted, f"{what}: {found:.1f}, less than {LEAST:.0%} of {wanted:.1f}")


def below(what, counted, rate, unit=1):
    """No more has passed than `rate` a second allows. `unit`: what a request counts.

    A look may miss what has passed the limit and is not counted yet: one more slack.
    """
    at_most(what, counted.count, rate * (counted.longest_s + 2 * SLACK_S) + REQUESTS_MORE * unit)


def close(what, counted, rate, unit=1):
    """`below`, and at least 95 % of it."""
    below(what, counted, rate, unit)
    at_least(what, counted.count, rate * counted.shortest_s)


def alike(what, one, other, percent):
    """Two measured values differ by `percent` % of the second one at most. For tests with the mark `timed` or `paced`."""
    needs_cpu(abs(one - other) <= other * percent / 100, f"{what}: {one:.1f} and {other:.1f} differ by more than {percent} %")
