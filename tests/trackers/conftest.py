"""Keeps the packages of these tests from the network, before any of them is imported."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
