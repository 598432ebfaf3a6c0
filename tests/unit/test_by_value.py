"""Functions pickled by value keep their files and lines in tracebacks."""

import pickle

import cloudpickle

from elastane.process import called


def test_a_function_keeps_the_file_and_the_lines_of_all_its_code():
    def outer():
        def inner():
            raise KeyError

        return inner

    made = pickle.loads(called.dumps(outer))
    for given, got in ((outer, made), (outer(), made())):
        assert got.__code__.co_filename == __file__
        assert [*got.__code__.co_lines()] == [*given.__code__.co_lines()]


def test_the_pickler_of_other_packages_is_left_as_it_is():
    def function():
        return 1

    before = cloudpickle.dumps(function)
    called.dumps(function)
    assert cloudpickle.dumps(function) == before
