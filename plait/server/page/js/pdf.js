/**
 * The text of PDF files, by pdf.js: a part of this server, loaded when a PDF is first chosen. A file may come from
 * anywhere, so it is read in a worker of its own, which ends with it: nothing in it is run, drawn or fetched, and
 * its size, its pages, its text and the time are bounded.
 */

export const LIMITS = { bytes: 20 * 2 ** 20, pages: 200, chars: 512 * 1024, ms: 30_000 };
const MAGIC_BYTES = 1024; // where readers look for the mark
const OPTIONS = {
  isEvalSupported: false,
  enableXfa: false,
  disableFontFace: true,
  useSystemFonts: false,
  useWorkerFetch: false,
  useWasm: false,
  isOffscreenCanvasSupported: false,
  isImageDecoderSupported: false,
  maxImageSize: 0,
  stopAtErrors: false,
  verbosity: 0,
};
const WORKER = new URL("../vendor/pdf.worker.min.mjs", import.meta.url).href;
// Browsers ask for a policy before a script becomes a worker. This one knows one address.
const policy = self.trustedTypes?.createPolicy("plait-worker", { createScriptURL: () => WORKER });

/** A PDF cannot be read; the message says why. */
export class PdfError extends Error {}

/** Whether a File is a PDF, by its first bytes; its name may say anything. */
export async function isPdf(file) {
  const head = await file.slice(0, MAGIC_BYTES).text();
  return head.includes("%PDF-");
}

/** {text, pages, empty}: the text, how many pages there are, and how many have none. Raises PdfError. */
export async function readPdf(file, limits = LIMITS) {
  if (file.size > limits.bytes) fail(`it has ${file.size} bytes; at most ${limits.bytes} of a PDF are read`);
  const pdfjs = await import("../vendor/pdf.min.mjs").catch(() => fail("the reader of PDF files did not load"));
  const data = new Uint8Array(await file.arrayBuffer());
  const thread = new Worker(policy?.createScriptURL("") ?? WORKER, { type: "module" });
  let timer;
  const failed = new Promise((_, reject) => {
    const refuse = (why) => reject(new PdfError(why));
    timer = setTimeout(() => refuse(`it was not read within ${limits.ms / 1000} s`), limits.ms);
    thread.addEventListener("error", () => refuse("the reader of PDF files failed"));
  });
  try {
    const worker = new pdfjs.PDFWorker({ port: thread });
    return await Promise.race([textOf(pdfjs.getDocument({ ...OPTIONS, data, worker }), limits), failed]);
  } catch (error) {
    throw error instanceof PdfError ? error : new PdfError(reason(error));
  } finally {
    clearTimeout(timer);
    thread.terminate();
  }
}

async function textOf(task, { pages: mostPages, chars }) {
  const pdf = await task.promise;
  if (pdf.numPages > mostPages) fail(`it has ${pdf.numPages} pages; at most ${mostPages} are read`);
  const parts = [];
  let size = 0,
    empty = 0;
  for (let n = 1; n <= pdf.numPages; n++) {
    const text = await pageText(await pdf.getPage(n), chars - size);
    size += text.length;
    if (text === "") empty += 1;
    else parts.push(pdf.numPages > 1 ? `[Page ${n}]\n${text}` : text);
  }
  if (parts.length === 0) fail("it has no text: its pages are pictures, as of a scanner");
  return { text: parts.join("\n\n"), pages: pdf.numPages, empty };
}

/** The text of one page, read as it comes, so that a page without end ends here. */
async function pageText(page, most) {
  const reader = page.streamTextContent().getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    for (const { str = "", hasEOL } of value.items) text += hasEOL ? `${str}\n` : str;
    if (text.length > most) fail(`it has more text than the ${LIMITS.chars} characters that are read`);
  }
  page.cleanup();
  return text.replaceAll("\0", "").replace(/[ \t]+$/gm, "").replace(/\n{3,}/g, "\n\n").trim();
}

function reason(error) {
  if (error.name === "PasswordException") return "it is protected by a password";
  return "it is damaged, or no PDF";
}

function fail(why) {
  throw new PdfError(why);
}
