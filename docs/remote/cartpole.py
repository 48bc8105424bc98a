"""Plays CartPole for a trainer that listens: python cartpole.py ws://HOST:PORT TOKEN [GAMES]"""

import asyncio
import sys
import uuid

import aiohttp
import gymnasium

SPACES = {
    "observation": {"shape": [4], "dtype": "float32", "low": "-inf", "high": "inf"},
    "action": {"n": 2, "start": 0},
}


class Game:
    """A game, with the newest message about it: it is sent again after a lost connection."""

    def __init__(self):
        self.env = gymnasium.make("CartPole-v1")
        self.begin()

    def begin(self):
        observation, _ = self.env.reset()
        name = uuid.uuid4().hex
        self.message = {"episode": name, "step": 0, "obs": observation.tolist()}

    def step(self, action):
        observation, reward, terminated, truncated, _ = self.env.step(action)
        step = {"step": self.message["step"] + 1, "obs": observation.tolist()}
        outcome = {"reward": reward, "terminated": terminated, "truncated": truncated}
        self.message |= {**step, **outcome}
        return terminated or truncated


async def play(socket, token, games):
    await socket.send_json({"token": token, **SPACES})
    for game in games:
        await socket.send_json(game.message)
    async for received in socket:
        answer = received.json()
        if "error" in answer:
            sys.exit(answer["error"])
        for game in games:
            if game.message["episode"] != answer.get("episode"):
                continue
            over = "reset" in answer
            if not over:
                over = game.step(answer["action"])
                await socket.send_json(game.message)
            if over:
                game.begin()
                await socket.send_json(game.message)


async def main(url, token, count):
    games = [Game() for _ in range(count)]
    async with aiohttp.ClientSession() as session:
        for _ in range(1000):  # the trainer may be starting, or may come back
            try:
                async with session.ws_connect(url) as socket:
                    await play(socket, token, games)
            except (aiohttp.ClientError, TypeError):  # a lost connection has no JSON
                await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(*sys.argv[3:] or [8])))
