"""vast.ai's REST as this client speaks it (S2 6.3; rust-swactor.md 10.3, t_vastai), against scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.provisioner.vastai_api import VastClient
from tools.single_gpu_inference_rent import CreateFailed, NoOffer, Offer, RentError
from tools.single_gpu_inference_rest import VastAi, Wanted

KEY = "secret-key"
OFFER = Offer(5, 1, "RTX 4090", 0.3)


def row(id: int, dph: float, **more: Any) -> dict[str, Any]:
    return {"id": id, "dph_total": dph, "gpu_name": "RTX 4090", "host_id": 2, "geolocation": "Norway, NO", **more}


class Server:
    """Answers in order; the last one again and again."""

    def __init__(self, *answers: httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]) -> None:
        self.answers, self.asked = list(answers), list[httpx.Request]()
        api = VastClient(KEY, {"VASTAI_BASE_URL": "https://vast"}, pace=0)
        transport = httpx.MockTransport(self._answer)
        api._http = httpx.Client(base_url="https://vast", headers=dict(api._http.headers), transport=transport)
        self.plain = httpx.Client(transport=transport)
        self.client = VastAi(api, Wanted("img", "RTX_4090", 0.5))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer(request)

    def body(self, index: int = 0) -> dict[str, Any]:
        return dict(json.loads(self.asked[index].content))


def ok(**content: Any) -> httpx.Response:
    return httpx.Response(200, json=content)


@pytest.mark.spec("S2 6.3", "S2 7.1.1")
def test_the_cheapest_offer_that_fits() -> None:
    offers = [
        row(1, 0.4),
        row(2, 0.2, geolocation="China, CN"),
        row(3, 0.1, geolocation=None),
        row(4, 0.3),
        row(5, 0.6),
        {"id": "x"},
        None,
    ]
    server = Server(ok(offers=offers))
    assert server.client.find_offer(frozenset()) == Offer(4, 2, "RTX 4090", 0.3, "Norway, NO")
    assert server.client.find_offer(frozenset({4})).id == 1
    with pytest.raises(NoOffer, match="no RTX_4090 is for rent"):
        server.client.find_offer(frozenset({1, 4}))
    query = server.body()
    assert query["gpu_name"] == {"eq": "RTX 4090"} and query["reliability2"] == {"gte": 0.99}
    assert query["rentable"] == {"eq": True} and query["rented"] == {"eq": False} and query["verified"] == {"eq": True}
    assert query["cuda_max_good"] == {"gte": 12.0} and query["inet_down"] == {"gte": 100}
    assert query["direct_port_count"] == {"gte": 1}
    assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}" and KEY not in str(server.asked[0].url)


@pytest.mark.spec("S2 7.1.1")
def test_an_answer_that_is_not_understood_is_not_an_empty_market() -> None:
    for answer in (ok(offers=None), ok(other=1), httpx.Response(200, text="<html>"), httpx.Response(500, text="x")):
        with pytest.raises(RentError) as caught:
            Server(answer).client.find_offer(frozenset())
        assert not isinstance(caught.value, NoOffer)


@pytest.mark.spec("S2 5", "S2 6.3")
def test_create_sends_image_seed_and_onstart_and_takes_the_contract() -> None:
    server = Server(ok(success=True, new_contract=77))
    env = {"SEED_ADDR": "ab", "SEED_RELAY": "tcp://127.0.0.1:7700"}
    assert server.client.create(OFFER, "sgi-1", env) == 77
    assert (server.asked[0].method, server.asked[0].url.path) == ("PUT", "/api/v0/asks/5/")
    body = server.body()
    assert body["image"] == "img" and body["env"] == env and body["label"] == "sgi-1" and body["disk"] == 20
    assert body["onstart"] == "exec /usr/local/bin/gpu-node 2>&1"


@pytest.mark.spec("S2 7.1.2")
@pytest.mark.parametrize(
    ("answer", "contract", "uncertain"),
    [
        (httpx.Response(404, json={"success": False, "error": "invalid_args", "msg": "no_such_ask"}), 0, False),
        (httpx.Response(410, json={"error": "no_such_ask"}), 0, False),
        (httpx.Response(400, json={"error": "x", "new_contract": 9}), 9, False),
        (ok(success=False, msg="no"), 0, False),
        (ok(success=True), 0, True),
        (httpx.Response(200, text="{"), 0, True),
        (httpx.Response(502, text="bad gateway"), 0, True),
        (httpx.Response(429, text="API requests too frequent"), 0, False),
        (httpx.ReadTimeout("t"), 0, True),
        (httpx.ConnectError("c"), 0, False),
    ],
)
def test_a_create_that_failed_says_what_is_left(
    answer: httpx.Response | Exception, contract: int, uncertain: bool
) -> None:
    server = Server(answer)
    with pytest.raises(CreateFailed) as caught:
        server.client.create(OFFER, "l", {})
    assert (caught.value.contract, caught.value.uncertain) == (contract, uncertain)
    assert len(server.asked) == 1, "the paid call is never repeated"


@pytest.mark.spec("S2 6.3", "S2 7.1.3")
def test_the_state_of_an_instance() -> None:
    full = {
        "actual_status": "running",
        "intended_status": "running",
        "status_msg": "success,\n running",
        "public_ipaddr": "203.0.113.7\n",
        "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "20000"}]},
        "ssh_host": "ssh5.vast.ai",
        "ssh_port": 14568,
        "dph_total": 0.31,
    }
    found = Server(ok(instances=full)).client.instance(9)
    assert found and found.status == "running" and found.message == "success, running" and found.dph == 0.31
    assert found.ssh == (("203.0.113.7", 20000), ("ssh5.vast.ai", 14568), ("ssh5.vast.ai", 14569))
    empty = Server(ok(instances={"actual_status": None, "ports": None})).client.instance(9)
    assert empty and empty.status == "provisioning" and empty.ssh == ()
    assert Server(ok(instances=None)).client.instance(9) is None
    assert Server(httpx.Response(404, json={"error": "no_such_instance"})).client.instance(9) is None
    for answer in (ok(other=1), ok(instances=[]), httpx.Response(503)):
        with pytest.raises(RentError):
            Server(answer).client.instance(9)


@pytest.mark.spec("S2 6.3", "S2 7.2.1", "S2 7.3.5")
def test_logs_are_fetched_where_they_lie_and_the_key_stays_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def logs(*answers: httpx.Response) -> Server:
        server = Server(*answers)
        monkeypatch.setattr("httpx.get", lambda url, **_: server.plain.get(url))
        return server

    found = ok(success=True, result_url="https://s3/log")
    server = logs(found, httpx.Response(404), httpx.Response(200, text="a\nb"))
    assert server.client.logs(9, 40) == "a\nb"
    assert server.asked[0].url.path == "/api/v0/instances/request_logs/9/" and server.body() == {"tail": "40"}
    assert "Authorization" not in server.asked[-1].headers
    for answers in ([ok(success=True)], [found, httpx.Response(403)], [httpx.Response(500)]):
        with pytest.raises(RentError):
            logs(*answers).client.logs(9, 40)


@pytest.mark.spec("S2 6.3", "S2 7.4.1")
def test_destroy() -> None:
    server = Server(ok(success=True))
    server.client.destroy(9)
    assert (server.asked[0].method, server.asked[0].url.path) == ("DELETE", "/api/v0/instances/9/")
    for word in ("no_such_instance", "not_found"):
        Server(httpx.Response(404, json={"error": word})).client.destroy(9)
    auth = httpx.Response(404, json={"success": False, "error": "auth_error", "msg": "Invalid user key"})
    for answer in (auth, ok(success=False, msg="later"), httpx.Response(500), httpx.ReadTimeout("t")):
        with pytest.raises(RentError):
            Server(answer).client.destroy(9)


@pytest.mark.spec("S2 7.5.1")
def test_the_list_is_read_to_its_end_or_not_at_all() -> None:
    first = ok(
        success=True, instances=[{"id": 1, "label": "l"}, {"id": 2, "label": "other"}, {"id": 3}], next_token="t"
    )
    server = Server(first, ok(success=True, instances=[{"id": 4, "label": "l"}], next_token=None))
    assert server.client.labelled("l") == {1, 4}
    assert server.asked[1].url.params["after_token"] == "t"
    for answer in (ok(instances=None), ok(instances=""), httpx.Response(410, json={"error": "deprecated_endpoint"})):
        with pytest.raises(RentError):
            Server(answer).client.labelled("l")


def test_errors_are_one_sentence() -> None:
    said = httpx.Response(400, json={"msg": "bad\nx"})
    with pytest.raises(RentError) as caught:
        Server(said).client.find_offer(frozenset())
    assert "\n" not in str(caught.value)
    with pytest.raises(RentError, match="check VASTAI_API_KEY"):
        Server(httpx.Response(401)).client.find_offer(frozenset())
