"""Dialing the initial peers again."""

from types import SimpleNamespace

from lib.peer.redial import BootstrapRedialer


def test_peers_that_do_not_answer_are_dialed_more_often():
    answers = iter((True, False, TimeoutError, True))

    def call(_function, return_future):
        if (answer := next(answers)) is TimeoutError:
            raise answer
        return SimpleNamespace(result=lambda timeout: answer)

    dht = SimpleNamespace(run_coroutine=call)
    thread = BootstrapRedialer(dht, ["/ip4/192.0.2.1/tcp/1/p2p/Qm"], longest_period=10.0)
    periods = [thread.period]
    for _ in range(4):
        thread.work()
        periods.append(thread.period)
    assert periods == [10.0, 10.0, 2.0, 2.0, 10.0]
