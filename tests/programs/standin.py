"""Stand in for the model services of coding agents: Anthropic, OpenAI (responses and chat), Google. Stdlib only.

Runs inside the session. It answers a conversation that contains `add A B` N times with "sum-S-turn-N", S being the last
A + B: N shows that the agent still sends what was said before it was parked. Every request is logged to standard output.

    python3 standin.py PORT
"""

from __future__ import annotations

import http.server
import json
import re
import sys
from typing import Any

USAGE = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}


def answer(conversation: Any) -> str:
    """Read the user's side of a conversation, regardless of its shape, and compute the reply."""
    said = [one for one in conversation if isinstance(one, dict) and one.get("role", "user") == "user"]
    sums = re.findall(r"add (\d+) (\d+)", json.dumps(said))
    turns = list(dict.fromkeys(sums))  # agents repeat a line in their own notes
    return f"sum-{int(turns[-1][0]) + int(turns[-1][1])}-turn-{len(turns)}" if turns else "ready"


def anthropic(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    text = answer(body.get("messages", []))
    usage = {"input_tokens": 10, "output_tokens": 5}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model", "m"), "usage": usage}
    whole |= {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None}
    events = [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    ]
    return whole, events


def responses(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    given = body.get("input", [])
    text = answer(given if isinstance(given, list) else [{"content": given}])
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    whole = {"id": "resp_1", "object": "response", "status": "completed", "output": [item], "usage": USAGE}
    whole |= {"created_at": 1, "model": body.get("model", "m")}
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": text},
        {"type": "response.output_text.done", **at, "text": text},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [{**event, "sequence_number": number} for number, event in enumerate(events)]


def chat(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    text = answer(body.get("messages", []))
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    common = {"id": "c1", "created": 1, "model": body.get("model", "m")}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    kind = {"object": "chat.completion.chunk"}
    events = [{**common, **kind, "choices": [delta]}, {**common, **kind, "choices": [last], "usage": usage}]
    return {**common, "object": "chat.completion", "choices": [choice], "usage": usage}, events


def google(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    text = answer(body.get("contents", []))
    if "responseJsonSchema" in body.get("generationConfig", {}) or "responseSchema" in body.get("generationConfig", {}):
        text = json.dumps(
            {"reasoning": "r", "model_choice": "flash", "complexity_score": 1, "complexity_reasoning": "r"}
        )
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP", "index": 0}
    whole = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}
    return whole, [whole]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"data": [], "object": "list", "models": []})

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            raw = b""
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = {}
        path = self.path.partition("?")[0]
        if path.endswith(("count_tokens", ":countTokens")):
            self.reply({"input_tokens": 10, "totalTokens": 10})
        elif path.endswith("/messages"):
            self.talk(*anthropic(body), bool(body.get("stream")), named=True)
        elif path.endswith("/responses"):
            self.talk(*responses(body), bool(body.get("stream")), named=True)
        elif path.endswith("/chat/completions"):
            self.talk(*chat(body), bool(body.get("stream")), end="data: [DONE]\n\n")
        elif "GenerateContent" in path or path.endswith(":generateContent"):
            self.talk(*google(body), ":stream" in path)
        else:
            self.reply({})

    def talk(self, whole: Any, events: list[Any], stream: bool, named: bool = False, end: str = "") -> None:
        if not stream:
            self.reply(whole)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            name = f"event: {event['type']}\n" if named else ""
            self.piece(f"{name}data: {json.dumps(event)}\n\n")
        if end:
            self.piece(end)
        self.wfile.write(b"0\r\n\r\n")

    def piece(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *words: Any) -> None:
        print(format % words, flush=True)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
