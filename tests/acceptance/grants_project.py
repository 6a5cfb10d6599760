"""The app of `grants_rig` for a worker; `PROJECT_MONGO` and `PROJECT_BROKER` say where and as whom."""

from __future__ import annotations

import os

from tests.acceptance.grants_rig import bridge_on

bridge = bridge_on(os.environ["PROJECT_MONGO"], os.environ["PROJECT_BROKER"])
app = bridge.wiring.app
app.conf.worker_hijack_root_logger = True
