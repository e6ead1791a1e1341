"""One prompt becomes one trajectory: engines, chat templates, tools and rewards, and the loops that combine them."""

from agent_loop.chat import Chat
from agent_loop.code_answer import code_answer
from agent_loop.control_tokens import Tokenizer
from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt, sampled_tokens
from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.environment import EnvironmentClass, EnvironmentLoop, Step
from agent_loop.loop import AgentLoop, Message, Prompt, TurnLimits
from agent_loop.programs.program import ModelAccess, ProgramLoop, command, external
from agent_loop.reward import (
    Completion,
    FunctionReward,
    Reward,
    Score,
    cosine_length,
    exact_match,
    in_processes,
    math_answer,
    overlong_penalty,
    regex_match,
)
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.functions import FunctionTool, ToolClass
from agent_loop.tools.mcp import McpServer
from agent_loop.tools.program_tools import python_tool, shell_tool
from agent_loop.tools.sandbox import SandboxLimits, SandboxResult, check_sandbox, run_python, run_shell
from agent_loop.tools.tool import (
    MalformedCall,
    PauseGate,
    Tool,
    ToolCall,
    ToolReply,
    ToolRunner,
    describe_tool,
    parse_tool_calls,
)
from message_queue.errors import (
    AnswerError,
    ChatTemplateError,
    EngineError,
    ReplicaLostError,
    RewardError,
    RolloutError,
    SandboxError,
    StateLostError,
    ToolError,
)

__all__ = [
    "AgentLoop",
    "AnswerError",
    "Chat",
    "ChatTemplateError",
    "Completion",
    "Engine",
    "EngineError",
    "EnvironmentClass",
    "EnvironmentLoop",
    "FunctionReward",
    "FunctionTool",
    "GenerateRequest",
    "MalformedCall",
    "McpServer",
    "Message",
    "ModelAccess",
    "PauseGate",
    "ProgramLoop",
    "Prompt",
    "ReplicaLostError",
    "Reward",
    "RewardError",
    "RolloutError",
    "SamplingConfig",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "Score",
    "SegmentDecoder",
    "SingleTurnLoop",
    "StateLostError",
    "Step",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolClass",
    "ToolError",
    "ToolReply",
    "ToolRunner",
    "ToolUseLoop",
    "TurnLimits",
    "budget_left",
    "check_sandbox",
    "code_answer",
    "command",
    "cosine_length",
    "describe_tool",
    "exact_match",
    "external",
    "in_processes",
    "math_answer",
    "observe_prompt",
    "overlong_penalty",
    "parse_tool_calls",
    "python_tool",
    "regex_match",
    "run_python",
    "run_shell",
    "sampled_tokens",
    "shell_tool",
]
