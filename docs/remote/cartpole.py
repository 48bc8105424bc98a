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


def begin(games, env):
    """Begins an episode of a game, and returns its first message."""
    game = {"env": env, "message": {"episode": uuid.uuid4().hex, "step": 0}}
    game["message"]["observation"] = env.reset()[0].tolist()
    games[game["message"]["episode"]] = game
    return game["message"]


def step(game, action):
    """Takes an action, and keeps the message about it: it is sent again after a lost connection."""
    observation, reward, terminated, truncated, _ = game["env"].step(action)
    outcome = {"reward": float(reward), "terminated": terminated, "truncated": truncated}
    number = game["message"]["step"] + 1
    game["message"] |= {"step": number, "observation": observation.tolist(), **outcome}
    return game["message"]


async def play(socket, token, games):
    """Plays until the connection is lost."""
    await socket.send_json({"token": token, **SPACES})
    for game in games.values():
        await socket.send_json(game["message"])
    async for received in socket:
        if received.type is not aiohttp.WSMsgType.TEXT:
            return
        answer = received.json()
        if "error" in answer:
            sys.exit(answer["error"])
        if "action" in answer:
            message = step(games[answer["episode"]], answer["action"])
            await socket.send_json(message)
        if "reset" in answer or (
            "action" in answer and (message["terminated"] or message["truncated"])
        ):
            await socket.send_json(begin(games, games.pop(answer["episode"])["env"]))


async def main(url, token, count):
    games = {}
    for _ in range(count):
        begin(games, gymnasium.make("CartPole-v1"))
    async with aiohttp.ClientSession() as session:
        for _ in range(1000):  # the trainer may be starting, or may come back
            try:
                async with session.ws_connect(url) as socket:
                    await play(socket, token, games)
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(*sys.argv[3:] or [8])))
