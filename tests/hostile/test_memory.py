"""Memory of a server whose clients do not read their responses."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from bench.studies.raw_http2 import RawClient, method
from hostile.target import HELLO, OK, Target
from served import ServerProcess

MIB = 1 << 20
NUM_TOKENS = 115
MAPS = pb.EncodeRequest(
    inputs=[pb.Input(text="word " * (NUM_TOKENS - 2))], attention=[pb.AttentionQuery()]
).SerializeToString()
RESERVED_MIB = 2 * 12 * 12 * NUM_TOKENS**2 * 2 / MIB  # two copies of the maps of 12 layers in float16
NUM_ATTACKERS = 4
MAX_ROUNDS = 40


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses several loopback addresses")
@pytest.mark.parametrize("limit", [("--max-memory-bytes", 700), ("--max-call-memory-bytes", 160)])
def test_unread_responses_of_several_addresses_stay_within_the_limit_of_memory(
    minilm_bundle: Path, limit: tuple[str, int]
) -> None:
    options = (limit[0], str(limit[1] * MIB), "--no-explain", "--lanes", "1", "--threads", "1")
    with ServerProcess(minilm_bundle, *options) as server, ExitStack() as stack:
        target = Target(server)
        attackers = [
            stack.enter_context(RawClient(target.address, window_bytes=0, source=f"127.0.0.{number}"))
            for number in range(2, 2 + NUM_ATTACKERS)
        ]
        num_unread = num_refused = num_rounds = 0
        while num_refused < NUM_ATTACKERS:
            num_rounds += 1
            assert num_rounds < MAX_ROUNDS
            replies = [attacker.call(method("Encode"), MAPS) for attacker in attackers]
            for attacker, reply in zip(attackers, replies, strict=True):
                attacker.wait_for_heads([reply])
            assert {reply.reason for reply in replies} <= {"", "OVERLOADED"}
            num_refused = sum(bool(reply.reason) for reply in replies)
            num_unread += NUM_ATTACKERS - num_refused
        assert target.ask(method("Embed"), HELLO.SerializeToString()).status == OK
        peak_mib = target.process.peak_rss_mib
        stack.close()
        assert server.stop() == 0
        [planned] = re.findall(r"memory at most ([\d,]+) MiB .* calls ([\d,]+)", server.log())
    total, calls = (int(number.replace(",", "")) for number in planned)
    assert num_unread * RESERVED_MIB > 0.65 * calls  # 4 clients can hold 8/9, in whole responses
    assert peak_mib <= 1.1 * total
