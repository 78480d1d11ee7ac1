// node berry.mjs NODE_MODULES FILE...: what berry-agent's import and projection make of each log, as JSON
// {file: {messages, gates} or {refused}}; `refused` is the error of the import gates, `gates` what the gate of a
// live append says against a compaction/surface event of the log, and which event stands before its range.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [modules, ...files] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${modules}/berry-agent/dist/session/${name}.js`));
const { SessionLog } = await load("session");
const { runImportGates } = await load("import-gates");
const { deriveMessages } = await load("derive");

const gates = (events) => {
  const log = Object.create(SessionLog.prototype);
  return events.flatMap((event, index) => {
    if (event.type !== "compaction/surface") return [];
    log.log = events.slice(0, index);
    try {
      log.validateSurfaceOp(event.type, event.data, event.surfaceOp, event.sourceEventSeqs);
      return [];
    } catch (error) {
      return [{ after: events[event.surfaceOp.start - 1]?.type, error: String(error.message ?? error) }];
    }
  });
};

const found = {};
for (const file of files) {
  try {
    const { events } = runImportGates(readFileSync(file, "utf8"));
    found[file] = { messages: deriveMessages(events), gates: gates(events) };
  } catch (error) {
    found[file] = { refused: String(error.message ?? error) };
  }
}
console.log(JSON.stringify(found));
