/** Files that go with a message, as text: chosen, dropped or pasted. They are read here and sent as a part of it. */

import { byId, iconButton, make } from "./dom.js";
import { notify } from "./notices.js";

const FILES = 10,
  FILE_BYTES = 512 * 1024;

export class Attachments {
  /** `form`: where files may be dropped or pasted. `changed()` is called when the list is another. */
  constructor(form, changed) {
    this.files = [];
    this.changed = changed;
    const input = byId("attach-files");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      const chosen = [...input.files];
      input.value = ""; // so that the same file can be chosen again
      await this.add(chosen);
    });
    form.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    for (const [name, source] of [
      ["drop", "dataTransfer"],
      ["paste", "clipboardData"],
    ])
      form.addEventListener(name, (event) => {
        const files = [...(event[source]?.files ?? [])];
        if (files.length === 0) return;
        event.preventDefault();
        this.add(files);
      });
  }

  async add(files) {
    for (const file of files) {
      const why = this.files.length >= FILES ? `a message has at most ${FILES} files` : tooLarge(file);
      const text = why ? null : await read(file);
      if (text === null) {
        notify(`${file.name.slice(0, 80)} was not attached: ${why ?? "it is not text in UTF-8"}`, { ms: 0 });
        continue;
      }
      this.files.push({ name: file.name.replace(/[\p{Cc}`]/gu, " ").slice(0, 120), text });
    }
    this.show();
  }

  show() {
    const chips = this.files.map((file) => {
      const gone = () => {
        this.files = this.files.filter((one) => one !== file);
        this.show();
        byId("draft").focus();
      };
      return make("li", {}, make("span", {}, file.name), iconButton("close", `Remove ${file.name}`, gone));
    });
    byId("attached").replaceChildren(...chips);
    byId("attached").hidden = chips.length === 0;
    this.changed();
  }

  /** The files as text before `draft`, each in a fence that nothing in it closes; the list is empty then. */
  take(draft) {
    const parts = this.files.map(({ name, text }) => {
      const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
      const fence = "`".repeat(longest + 1);
      const kind = /\.([a-z0-9]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "";
      return `${name}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
    });
    this.files = [];
    this.show();
    return parts.join("") + draft;
  }
}

function tooLarge(file) {
  if (file.size <= FILE_BYTES) return null;
  return `it has ${file.size} bytes; at most ${FILE_BYTES} are read`;
}

/** The text of a file, or null if it has none. */
async function read(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}
