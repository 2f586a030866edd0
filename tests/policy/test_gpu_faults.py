"""Which fault a Metal error text means, and which texts are none."""

import pytest

from omlx_admission.gpu.faults import GpuFault, classify, classify_text

MLX = "[METAL] Command buffer execution failed: "


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (MLX + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
         "Hang"),
        (MLX + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
         "Timeout"),
        (MLX + "Caused GPU Address Fault Error "
         "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault)", "PageFault"),
        (MLX + "Impacting Interactivity "
         "(0000000e: kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
         "ImpactingInteractivity"),
        (MLX + "Internal Error (0000000e:Internal Error)", "ImpactingInteractivity"),
        (MLX + "Ignored (for causing prior/excessive GPU errors) "
         "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)", "SubmissionsIgnored"),
        (MLX + "Discarded (victim of GPU error/recovery) "
         "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)", "InnocentVictim"),
        (MLX + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
         "OutOfMemory"),
        (MLX + "Insufficient Memory", "OutOfMemory"),
        ("kIOGPUCommandBufferCallbackErrorSubmissionsIgnored", "SubmissionsIgnored"),
        ("kIOAccelCommandBufferCallbackErrorHang", "Hang"),
        ("Caused GPU Hang Error (IOAF code 3)", "Hang"),
        ("Ignored (for causing prior/excessive GPU errors) (IOAF code 4)",
         "SubmissionsIgnored"),
        ("Discarded (victim of GPU error/recovery) "
         "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)", "InnocentVictim"),
        ("ANE input pack command buffer failed; canceling this dispatch:\n"
         "Error Domain=MTLCommandBufferErrorDomain Code=1 "
         '"Discarded (victim of GPU error/recovery)" UserInfo={NSUnderlyingError=0x1 '
         '{Error Domain=IOGPUCommandQueueErrorDomain Code=5 "(null)"}}', "InnocentVictim"),
        ("Execution of the command buffer was aborted due to an error during execution. "
         "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
         "PageFault"),
    ],
)  # fmt: skip
def test_known_texts(text: str, fault: str) -> None:
    assert classify_text(text) is GpuFault(fault)
    assert classify(RuntimeError(text)) is GpuFault(fault)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "There is no Stream(gpu, 3) in current thread.",
        "[metal::malloc] Resource limit (499000) exceeded.",
        "[METAL] Command buffer execution failed: something new (000000ff:kSomethingNew)",
        "Hang",
        "Timeout",
        "Request timed out",
        "model said: Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
        "prompt too long: '" + MLX + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)'",
        "tool call failed to parse: kIOGPUCommandBufferCallbackErrorSubmissionsIgnored",
    ],
)
def test_other_texts_are_no_fault(text: str) -> None:
    assert classify(ValueError(text)) is None
    assert classify(RuntimeError(text)) is None


def test_text_far_behind_a_genuine_start_is_not_read() -> None:
    quoted = "kIOGPUCommandBufferCallbackErrorSubmissionsIgnored"
    assert classify_text(MLX + "?" * 5000 + quoted) is None


def test_the_refusal_outranks_the_cause_and_the_cause_its_victim() -> None:
    hang = MLX + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)"
    victim = MLX + "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
    refused = MLX + "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
    assert classify_text(f"{victim}\n{hang}") is GpuFault.HANG
    group = ExceptionGroup("two", [RuntimeError(victim), RuntimeError(refused)])
    assert classify(group) is GpuFault.SUBMISSIONS_IGNORED


def _raise_while_handling(error: Exception, later: Exception) -> None:
    try:
        raise error
    except RuntimeError:
        raise later  # noqa: B904 - the implicit chain is meant


def test_causes_and_contexts_are_followed() -> None:
    hang = RuntimeError(MLX + "Caused GPU Hang Error (00000003:x)")
    caused = ValueError("generation failed")
    caused.__cause__ = hang
    assert classify(caused) is GpuFault.HANG
    with pytest.raises(KeyError) as caught:
        _raise_while_handling(hang, KeyError("while cleaning up"))
    assert classify(caught.value) is GpuFault.HANG
    caught.value.__suppress_context__ = True
    assert classify(caught.value) is None


def test_only_runtime_errors_speak_for_metal() -> None:
    text = "kIOGPUCommandBufferCallbackErrorSubmissionsIgnored"
    assert classify(RuntimeError(text)) is GpuFault.SUBMISSIONS_IGNORED
    assert classify(ValueError(text)) is None


def test_odd_exceptions_do_not_raise() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise TypeError("no text")

    assert classify(Mute()) is None
    loop = ValueError("a")
    loop.__cause__ = other = ValueError("b")
    other.__cause__ = loop
    assert classify(loop) is None


def test_what_counts_as_a_lockup() -> None:
    assert {fault.value for fault in GpuFault if fault.is_lockup} == {
        "Hang",
        "Timeout",
        "PageFault",
        "ImpactingInteractivity",
    }
