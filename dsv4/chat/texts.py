"""The fixed words of the prompt format: markers, tag names, instruction texts.

Every string here is compared byte for byte with what the model was trained on; nothing in this
file may be reworded, reflowed or "corrected". Braces mark the places where a prompt fills in
its own text (they are filled by `str.replace`, never by a template engine).
"""

from typing import Final

# Markers. The bars are U+FF5C and the low lines in BOS and EOS are U+2581.
BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
PAD: Final = "<｜▁pad▁｜>"
SYSTEM: Final = "<｜System｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
DSML: Final = "｜DSML｜"
LATEST_REMINDER: Final = "<｜latest_reminder｜>"
IMAGE_V41: Final = "<｜deepseek_image｜>"

TASKS: Final = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

# Markers that the model may write inside an answer (places in an image).
GROUNDING: Final = (
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
)

EFFORT_ABSOLUTE: Final = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to"
    " resolve the root cause, rigorously stress-testing your logic against all potential paths,"
    " edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step,"
    " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
    " unchecked.\n\n"
)
EFFORT_BEYOND: Final = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance:"
    " exhaustively decompose the problem into its most fundamental components, trace every causal"
    " chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles"
    " and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORT_V41: Final = (
    "Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the"
    " reasoning)\n\n"
)

TOOLS_BLOCK: Final = (
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question."
    ' You can invoke tools by writing a "<｜DSML｜{block}>" block like the following:\n\n'
    "<｜DSML｜{block}>\n"
    '<｜DSML｜{invoke} name="$TOOL_NAME">\n'
    '<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    "</｜DSML｜{parameter}>\n"
    "...\n"
    "</｜DSML｜{invoke}>\n"
    '<｜DSML｜{invoke} name="$TOOL_NAME2">\n'
    "...\n"
    "</｜DSML｜{invoke}>\n"
    "</｜DSML｜{block}>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types'
    " (numbers, booleans, arrays, objects), pass the value in JSON format and set"
    ' `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning"
    " inside <think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
    "{schemas}\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool"
    " calls.\n"
)
ADDED_TOOLS_V41: Final = "\n\n### Updated Tool Schemas\n\n{schemas}"

RESPONSE_FORMAT: Final = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)
JSON_OBJECT_V4: Final = (
    "You are a helpful assistant designed to output JSON.\n"
    "## Response Format:\n\nReply with JSON object ONLY."
)

TOOL_RESULT_OPEN: Final = "<tool_result>"
TOOL_RESULT_CLOSE: Final = "</tool_result>"
SYSTEM_REMINDER: Final = "<system-reminder>\n{content}\n</system-reminder>"
UNSUPPORTED_IMAGE: Final = "[Unsupported Image]"
UNSUPPORTED_PART: Final = "[Unsupported {type}]"
