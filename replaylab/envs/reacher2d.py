"""The Decision Transformer's Reacher2d: a two-link arm on a table earns 1 for each step its tip is at the goal.

Rebuilt from its description, as its data were never published: links of 0.6 and 0.4, torques in [-1, 1], 15 physics
steps of 0.01 s per action, no gravity, episodes of 100 steps that never terminate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from replaylab.envs.d4rl import MujocoEnv, load_model, mujoco, simulation

# The arm touches nothing, so contacts are off. At angle zero the upper arm points along 45 degrees (0.785 rad, as in
# the original), the forearm along x. The goal's site is only for rendering, and must not start at the origin:
# MuJoCo would assume that it stays there.
XML = """
<mujoco model="reacher2d">
  <compiler angle="radian"/>
  <option timestep="0.01" integrator="RK4" gravity="0 0 0"/>
  <default>
    <joint type="hinge" axis="0 0 1" damping="1" armature="0.05"/>
    <geom type="capsule" size="0.05" contype="0" conaffinity="0" rgba="0.5 0.5 0.7 1"/>
    <motor ctrllimited="true" ctrlrange="-1 1" gear="1"/>
  </default>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1"/>
    <geom name="table" type="plane" pos="0 0 -0.1" size="2 2 0.1" rgba="0.7 0.7 0.7 1"/>
    <site name="goal" pos="1 0 0" size="0.05" rgba="0.4 0.7 0.4 1"/>
    <body name="upper" euler="0 0 0.785">
      <joint name="shoulder" limited="false"/>
      <geom fromto="0 0 0 0.6 0 0"/>
      <body name="fore" pos="0.6 0 0" euler="0 0 -0.785">
        <joint name="elbow" limited="true" range="-2 3.5"/>
        <geom fromto="0 0 0 0.4 0 0"/>
        <site name="tip" pos="0.45 0 0" size="0.05" rgba="0.6 0.3 0.3 1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="shoulder"/><motor joint="elbow"/></actuator>
</mujoco>"""


class Reacher2dEnv(MujocoEnv):
    """Observation (12): sin and cos of both angles, dt * velocities, tip, goal, tip - goal."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        self.goal = np.zeros(2)
        space = Box(-np.inf, np.inf, (12,), np.float64)
        super().__init__(__file__, 15, space, default_camera_config={"distance": 4.0}, **kwargs)  # the model is here

    def _initialize_simulation(self) -> tuple[Any, Any]:
        return simulation(self, load_model(XML, density=1000.0))  # as in the original, on MuJoCo 2.0

    def _observe(self) -> np.ndarray:
        angle, tip = self.data.qpos, self.data.site("tip").xpos[:2]
        return np.concatenate([np.sin(angle), np.cos(angle), self.dt * self.data.qvel, tip, self.goal, tip - self.goal])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        self.do_simulation(action, self.frame_skip)  # the motors clip it
        mujoco.mj_kinematics(self.model, self.data)  # after mj_step the tip lags behind the angles
        observation = self._observe()
        reward = float(np.abs(observation[10:]).sum() < 0.1)
        if self.render_mode == "human":
            self.render()
        return observation, reward, False, False, {}

    def reset_model(self) -> np.ndarray:
        qpos = self.np_random.uniform(-2.0, 2.0, 2)
        while True:  # a goal in the ring that the arm can reach
            self.goal = self.np_random.uniform(-1.5, 1.5, 2)
            if 0.5 <= np.linalg.norm(self.goal) <= 1.0:
                break
        self.model.site("goal").pos[:2] = self.goal
        self.set_state(qpos, np.zeros(2))
        return self._observe()
