"""Coding agents in the middle of a conversation, against a stand-in for their model services inside the session."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import ClassVar

from tests.programs import standin
from tests.programs.driver import drive
from tests.programs.scenario import CACHE, HOME, MODULES, WORK, Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

BIN = MODULES / ".bin"
PORT = 8010
URL = f"http://127.0.0.1:{PORT}"
SERVICE = f"/usr/bin/python3 {WORK}/standin.py {PORT} > {HOME}/standin.log 2>&1 < /dev/null &"
KEY = "sk-ant-stand-in-0123456789abcdef"
UP = f"until (: < /dev/tcp/127.0.0.1/{PORT}) 2> /dev/null; do sleep .1; done"


class Agent(Scenario):
    """Say a line, see the answer that depends on every line said before."""

    prompt: ClassVar[str]  # on the screen when it is ready for the first line
    config: ClassVar[dict[str, str]] = {}  # below HOME

    def command(self, directory: Path) -> tuple[str, ...]:
        (directory / "standin.py").write_text(Path(standin.__file__).read_text())
        for relative, content in self.config.items():
            target = directory / "home" / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        return super().command(directory)

    before = f"[ ! -d home ] || mv -T home {HOME}/cfg; cp -rT {HOME}/cfg {HOME} 2> /dev/null; {SERVICE} {UP}"

    def state(self, terminal: Terminal) -> None:
        terminal.shows(self.prompt, 120)
        self.say(terminal, "add 100 0", "sum-100-turn-1")

    def work(self, terminal: Terminal, number: int) -> None:
        self.say(terminal, f"add 100 {number}", f"sum-{100 + number}-turn-{number + 1}")

    def say(self, terminal: Terminal, line: str, reply: str) -> None:
        terminal.type(line)
        terminal.shows(line)  # Enter that comes with the text is taken for a pasted line break
        for _ in range(15):  # Enter may be ignored while the answer before is being painted; alone it does nothing
            terminal.type("\r")
            with contextlib.suppress(AssertionError):
                terminal.shows(reply, 3)
                return
        terminal.shows(reply, 3)


class ClaudeCode(Agent):
    name = "Claude Code"
    argv = (str(BIN / "claude"),)
    prompt = r"^\s*[❯>]"
    env = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    config = {
        ".claude.json": json.dumps(
            {
                "hasCompletedOnboarding": True,
                "theme": "dark",
                "customApiKeyResponses": {"approved": [KEY[-20:]], "rejected": []},
                "projects": {WORK: {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}},
            }
        )
    }


class Codex(Agent):
    name = "codex"
    argv = (str(BIN / "codex"), "--no-alt-screen", "--no-daemon")
    advice = (
        "Start it with `--no-daemon`: its daemon knows processes by their start time, which a restore changes, and may end"
        " the server that the screen is connected to."
    )
    prompt = r"›|context left|for shortcuts"
    env = {"STANDIN_KEY": "k"}
    config = {
        ".codex/config.toml": f"""
model = "gpt-5"
model_provider = "standin"
check_for_update_on_startup = false
approval_policy = "never"
sandbox_mode = "read-only"
[model_providers.standin]
name = "standin"
base_url = "{URL}/v1"
env_key = "STANDIN_KEY"
wire_api = "responses"
[projects."{WORK}"]
trust_level = "trusted"
[analytics]
enabled = false
"""
    }


class Gemini(Agent):
    name = "gemini-cli"
    argv = (str(BIN / "gemini"), "--model", "gemini-2.5-flash", "--skip-trust")
    prompt = "Type your message"
    env = {
        "GEMINI_API_KEY": "k",
        "GOOGLE_GEMINI_BASE_URL": URL,
        "PATH": "/usr/bin:/bin",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    config = {
        ".gemini/settings.json": json.dumps(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "general": {"disableAutoUpdate": True, "disableUpdateNag": True, "enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                "ui": {"hideTips": True, "hideBanner": True},
            }
        )
    }


class OpenCode(Agent):
    name = "opencode"
    argv = (str(BIN / "opencode"),)
    prompt = "Ask anything"
    env = {"PATH": "/usr/bin:/bin", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    config = {
        ".config/opencode/opencode.json": json.dumps(
            {
                "autoupdate": False,
                "share": "disabled",
                "model": "standin/m",
                "small_model": "standin/m",
                "provider": {
                    "standin": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "standin",
                        "options": {"baseURL": f"{URL}/v1", "apiKey": "k"},
                        "models": {"m": {"name": "m", "limit": {"context": 100000, "output": 1000}}},
                    }
                },
            }
        )
    }


class Aider(Agent):
    argv = (str(CACHE / "aider" / "bin" / "aider"),)
    prompt = r"^(?:ask)?>"
    env = {
        "OPENAI_API_BASE": f"{URL}/v1",
        "OPENAI_API_KEY": "k",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_SHOW_RELEASE_NOTES": "false",
        "AIDER_GIT": "false",
        "AIDER_MODEL": "openai/m",
        "AIDER_CHAT_MODE": "ask",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


@each("Coding agents", ClaudeCode, Codex, Gemini, OpenCode, Aider)
def test_agents(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
