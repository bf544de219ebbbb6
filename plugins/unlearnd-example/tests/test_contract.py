import pytest
from unlearnd_example import ExampleBackend

from unlearnd.testing import BackendContract


class TestExample(BackendContract):
    @pytest.fixture
    def backend(self):
        return ExampleBackend()
