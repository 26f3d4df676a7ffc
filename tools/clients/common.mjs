/** What every script here asks, and how it tells what worked: one JSON object, feature to error or null. */

export const URL = process.env.SERVER_URL,
  MODEL = process.env.SERVER_MODEL,
  QUESTION = "Name a color.",
  MESSAGES = [{ role: "user", content: QUESTION }];
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

export function expect(found) {
  if (!found) throw new Error("nothing came");
}

export async function report(features) {
  const found = {};
  for (const [name, act] of Object.entries(features)) {
    try {
      await act();
      found[name] = null;
    } catch (error) {
      found[name] = String(error).slice(0, 300);
    }
  }
  console.log(JSON.stringify(found));
}
