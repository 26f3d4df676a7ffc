/** Files that go with a message, as text: chosen, dropped or pasted. They are read here and sent as a part of it. */

import { byId, iconButton, make } from "./dom.js";
import { notify } from "./notices.js";
import { LIMITS, PdfError, isPdf, readPdf } from "./pdf.js";

const FILES = 10,
  FILE_BYTES = 512 * 1024;

export class Attachments {
  /** `form`: where files may be dropped or pasted. `changed()` is called when the list is another. */
  constructor(form, changed) {
    this.files = [];
    this.coming = []; // names of those that are being read
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

  /** Whether a file is still being read: a message that is sent now would go without it. */
  get isReading() {
    return this.coming.length > 0;
  }

  async add(files) {
    for (const file of files) {
      const name = file.name.replace(/[\p{Cc}`]/gu, " ").slice(0, 120);
      this.coming.push(name);
      this.show();
      try {
        if (this.files.length >= FILES) throw new FileError(`a message has at most ${FILES} files`);
        this.files.push({ name, ...(await read(file, name)) });
      } catch (error) {
        if (!(error instanceof FileError) && !(error instanceof PdfError)) throw error;
        notify(`${file.name.slice(0, 80)} was not attached: ${error.message}`, { ms: 0 });
      } finally {
        this.coming.splice(this.coming.indexOf(name), 1);
        this.show();
      }
    }
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
    const coming = this.coming.map((name) => make("li", { class: "coming quiet" }, make("span", {}, `Reading ${name}…`)));
    chips.push(...coming);
    byId("attached").replaceChildren(...chips);
    byId("attached").hidden = chips.length === 0;
    this.changed();
  }

  /** The files as text before `draft`; the list is empty then. */
  take(draft) {
    const text = this.with(draft);
    this.files = [];
    this.show();
    return text;
  }

  /** The same, and the list stays: each file in a fence that nothing in it closes. */
  with(draft) {
    const parts = this.files.map(({ name, text, isPaged }) => {
      const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
      const fence = "`".repeat(longest + 1);
      const kind = isPaged ? "" : (/\.([a-z0-9]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "");
      return `${name}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
    });
    return parts.join("") + draft;
  }
}

/** A file cannot be attached; the message says why. */
class FileError extends Error {}

/** {text} of a file, or {text, isPaged} of a PDF. Raises FileError and PdfError. */
async function read(file, name) {
  const sniffed = await isPdf(file).catch(() => null);
  if (sniffed === null) throw new FileError("it could not be read");
  if (sniffed) return pdf(file, name);
  if (file.size > FILE_BYTES) throw new FileError(`it has ${file.size} bytes; at most ${FILE_BYTES} are read`);
  const bytes = await file.arrayBuffer().catch(() => null);
  if (bytes === null) throw new FileError("it could not be read");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { text: text.replaceAll("\r\n", "\n") };
  } catch {
    // said below
  }
  throw new FileError("it is neither text in UTF-8 nor a PDF");
}

async function pdf(file, name) {
  const { text, pages, empty } = await readPdf(file, LIMITS);
  if (empty > 0)
    notify(`${name}: ${empty} of ${pages} pages ${empty === 1 ? "has" : "have"} no text, and could not be read`);
  return { text, isPaged: true };
}
