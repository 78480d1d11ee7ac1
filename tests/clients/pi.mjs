// node pi.mjs NODE_MODULES FILE...: what pi's own SessionManager makes of each file, as JSON {file: messages or error}.
import { pathToFileURL } from "node:url";

const [modules, ...files] = process.argv.slice(2);
const entry = pathToFileURL(`${modules}/@earendil-works/pi-coding-agent/dist/index.js`);
const { SessionManager } = await import(entry);
const found = {};
for (const file of files) {
  try {
    found[file] = { messages: SessionManager.open(file).buildSessionContext().messages };
  } catch (error) {
    found[file] = { error: String(error.message ?? error) };
  }
}
console.log(JSON.stringify(found));
