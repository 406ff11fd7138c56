"""The function that answers, and the tokens that it answers in."""

from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.simulator.model import Context, following_logprobs, greedy
from rollfleet_engine.simulator.tokens import ALPHABET, VOCABULARY, decode, encode

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@given(st.text(alphabet=ALPHABET))
def test_text_survives_the_tokenizer(text: str):
    assert decode(encode(text)) == text


def test_what_is_not_in_the_alphabet_reads_as_a_question_mark():
    assert decode(encode("a€b\t")) == "a?b?"
    assert decode((1, VOCABULARY - 1)) == " "


@given(TOKENS, st.integers(1, 30), st.integers(1, 30))
def test_an_answer_continues_itself(prompt: list[int], first: int, second: int):
    whole = greedy("sha256:a", prompt, first + second)
    assert whole[:first] == greedy("sha256:a", prompt, first)
    assert whole[first:] == greedy("sha256:a", [*prompt, *whole[:first]], second)


@given(TOKENS)
def test_the_best_token_is_the_likeliest(prompt: list[int]):
    context = Context("sha256:a", prompt)
    best = max(range(VOCABULARY), key=context.logprob)
    assert best == context.best()
    assert all(context.logprob(token) < 0 for token in range(VOCABULARY))


@given(TOKENS)
def test_logprobs_of_a_prompt_are_those_of_its_generation(prompt: list[int]):
    output = greedy("sha256:a", prompt, 3)
    following = following_logprobs("sha256:a", [*prompt, *output])
    assert len(following) == len(prompt) + 2
    assert all(value > -1.1 for value in following[-3:])  # each was the best one


def test_other_weights_answer_otherwise():
    prompt = encode("What is the answer?")
    answers = {greedy(f"sha256:{number}", prompt, 20) for number in range(50)}
    assert len(answers) == 50
    assert following_logprobs("sha256:1", prompt) != following_logprobs("sha256:2", prompt)
