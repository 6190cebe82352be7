"""Connections and HTTP/2 frames without a purpose. test_proxy.py repeats the attacks through a proxy."""

import pytest

from bench.studies.attackers import ATTACKS, attacking
from bench.studies.proxied import latencies
from hostile.target import Target


@pytest.mark.parametrize("attack", ATTACKS)
def test_client_is_answered_during_an_attack_that_takes_no_memory(target: Target, attack: str) -> None:
    with attacking(attack, target.address, 1) as attacker:
        latencies(target.address, 1.2)
        assert attacker.stdout is not None
        assert int(attacker.stdout.read()) > 0
    assert target.peak_growth_mib < 150
