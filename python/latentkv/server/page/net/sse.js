// Server-sent events of a fetch response.

/** Yields the data of each event as it comes; `[DONE]` ends the stream, and its absence is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = payload(part);
        if (data === "[DONE]") return;
        if (data) yield data;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The connection broke off.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function payload(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
