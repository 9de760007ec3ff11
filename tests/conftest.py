import pytest
from hypothesis import settings

settings.register_profile("chairlift", deadline=None)  # a busy machine is no failure
settings.load_profile("chairlift")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
