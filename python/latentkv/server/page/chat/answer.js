// One answer: what is sent for it, and how chunks become a message.

import { post } from "../net/api.js";
import { events } from "../net/sse.js";
import { inWords } from "./attachments.js";

export const blank = () => ({ role: "assistant", content: "", reasoning: "", tool_calls: [] });

/**
 * Fills `message` as chunks come and calls `changed` after each.
 * Throws what went wrong; AbortError if stopped.
 */
export async function answer(conversation, sampling, message, signal, changed) {
  const body = {
    messages: sent(conversation, message),
    stream: true,
    stream_options: { include_usage: true },
    ...sampling,
  };
  const response = await post("v1/chat/completions", body, signal);
  for await (const data of events(response)) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    take(message, chunk);
    changed();
  }
}

/** The conversation before `message`, as the server's template reads it. Reasoning stays here. */
function sent(conversation, message) {
  const before = conversation.messages.slice(0, conversation.messages.indexOf(message));
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  return [...system, ...before.filter((each) => !isEmpty(each)).map(bare)];
}

const isEmpty = (message) => message.role === "assistant" && !message.content && !message.tool_calls?.length;

function bare(message) {
  const { role, content, tool_calls } = message;
  if (role === "user") return { role, content: inWords(message) };
  return tool_calls?.length ? { role, content, tool_calls } : { role, content };
}

function take(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  if (chunk.timings) message.timings = chunk.timings;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  message.content += choice.delta?.content ?? "";
  message.reasoning += choice.delta?.reasoning_content ?? "";
  for (const call of choice.delta?.tool_calls ?? []) takeCall(message.tool_calls, call);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** Deltas of a call: its name comes once, its arguments piece by piece. */
function takeCall(calls, { index = 0, id, function: part }) {
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= id ?? "";
  call.function.name += part?.name ?? "";
  call.function.arguments += part?.arguments ?? "";
}
