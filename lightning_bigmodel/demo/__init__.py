"""The demo behind ``bigmodel demo``: a small GPT trained over pipeline stages and data replicas on this machine."""

from lightning_bigmodel.demo.command import run_demo
from lightning_bigmodel.demo.settings import DemoSettings

__all__ = ["DemoSettings", "run_demo"]
