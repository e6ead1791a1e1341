"""The error model: every error that the project raises on purpose is an AsyncRLError.

An error names field, value and way out in its text. Code tells errors apart by class, never by text. What went wrong in
data is no exception: a group that is given up has a `Drop` (`message_queue.ledger`), a failed rollout or call of user
code has a `Failure` (`agent_loop.user_errors`), a failed rollout that was written has a `FailedRollout`
(`async_rl.files.rollouts`). Each has a kind for code and a text for people.

    error                raised by                       caught by                  what follows
    ToolError            a tool                          the tool runner            the model reads the text
    OvertimeError        `boundary` around user code     callers of `boundary`      a RolloutError, or a reply
    RolloutError         agent loops, tools, rewards     the rollouter              a retry, or a failed rollout
      StateLostError     tools with state                the rollouter              the rollout starts over
      PromptError        agent loops                     the rollouter              a failed rollout without retry
      RewardError        rewards                         the rollouter              a retry, or a failed rollout
    AnswerError          clients of engines              the decoder                the request is repeated
    ReplicaLostError     clients of engines              router and supervisor      another replica, and a new one
    other EngineError    engines                         run_stage                  StageError
    ContractError        checks of data that enters      run_stage                  StageError
    QueueError           the queue                       run_stage                  StageError
    StalenessError       the queue                       run_stage                  StageError
    JournalError         journal and content files       run_stage                  StageError
    StageError           a stage of the controller       recovery, else the command a restart of parts, else exit code 1
    ConfigError          checks before the start         the command                exit code 2
    ChatTemplateError    checks before the start         the command                exit code 2
    SandboxError         a start without isolation       the command, tools         a RolloutError, or exit code 2

Where each is shown:

    console, logs/driver.log         warnings with the count of their repeats; the chain of causes of a run that ended
    ledger.jsonl, report             kind and reason of each dropped group
    rollouts/failed-NNNNNN.jsonl     failed rollouts with kind, line of the user, text and conversation

`async_rl` has further errors next to the code that raises them, such as TrainerLostError and PlacementError.
"""

from __future__ import annotations


class AsyncRLError(RuntimeError):
    """Base of all errors of the project."""


# ---- data


class ContractError(AsyncRLError, ValueError):
    """Data that breaks the contract between rollout and training; the message names the field and the value."""


class StalenessError(AsyncRLError):
    """A token older than the bound reached the trainer's side; names group, version and staleness."""


# ---- the queue and its files


class QueueError(AsyncRLError):
    """The queue refuses a call."""


class QueueClosed(QueueError):
    """The queue is closed; the message counts the groups that are left in it."""


class JournalError(AsyncRLError):
    """The journal refuses a call. The message names the file or directory and the way out."""


class JournalFormatError(JournalError):
    """The directory holds a journal of another format version."""


class JournalMismatch(JournalError):
    """The journal is of another run, of another checkpoint, or of settings that groups in flight depend on."""


class JournalBusy(JournalError):
    """Another process has the journal open."""


class JournalUnwritable(JournalError):
    """The directory cannot be written, or the disk has no room. Nothing of the call is recorded; it can be repeated."""


class JournalBroken(JournalError):
    """The journal is damaged, or the disk failed in a way that leaves its content unknown. Nothing more is recorded."""


# ---- engines


class EngineError(AsyncRLError):
    """An engine cannot serve; names replica and cause."""


class AnswerError(EngineError):
    """An engine that still serves gave an answer that breaks the contract; the request may be repeated.

    Names replica, request, and the field and value that were refused. Nothing of the answer is used.
    """


class ReplicaLostError(EngineError):
    """A replica is dead or cannot be reached; another one may serve the request."""


# ---- rollouts and user code


class RolloutError(AsyncRLError):
    """This rollout cannot be finished, though the engines serve: its group is dropped with the reason."""


class StateLostError(RolloutError):
    """The rollout cannot be resumed, because a tool has lost its state: it has to start over."""


class PromptError(RolloutError):
    """No rollout of this prompt can succeed, so that none is retried."""


class RewardError(RolloutError):
    """The reward failed or timed out; names the prompt and the cause."""


class ToolError(AsyncRLError):
    """Raised by a tool; the text explains to the model why its call is wrong."""


class OvertimeError(AsyncRLError):
    """User code gave no answer in time."""


class SandboxError(AsyncRLError):
    """Programs cannot be isolated on this machine; says why."""


class ChatTemplateError(AsyncRLError, ValueError):
    """A chat template or tokenizer that cannot continue a conversation token by token; says why."""
