import random, pytest, collections
from tests.server.engine.test_exactness import *
from tests.conftest import *
@pytest.mark.parametrize("spec", ["off","ngram"])
@pytest.mark.parametrize("cache", [True, False])
async def test_try(spec, cache, nano_f32, prompts, alone):
    rng = random.Random("all at once")
    bad=[]
    for again in range(3):
        requests = [Request(prompt, N, delay=rng.uniform(0, 0.5)) for prompt in prompts]
        with running(nano_f32, **EXACT, parallel=8, ctx_size=8192, speculation=spec, prefix_cache=cache) as engine:
            answers = await ask_all(engine, requests)
        for r,a,e in zip(requests, answers, alone):
            if a.tokens != e: bad.append((len(r.prompt), next(i for i,(x,y) in enumerate(zip(a.tokens,e)) if x!=y)))
    assert not bad, bad
del test_together_as_alone
