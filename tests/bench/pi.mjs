// node pi.mjs NODE_MODULES FILE: pi loads a session and prepares its compaction; what it found, in three figures.
import { pathToFileURL } from "node:url";

const [modules, file] = process.argv.slice(2);
const dist = pathToFileURL(`${modules}/@earendil-works/pi-coding-agent/dist/`);
const { SessionManager } = await import(`${dist}index.js`);
const { prepareCompaction, DEFAULT_COMPACTION_SETTINGS } = await import(`${dist}core/compaction/compaction.js`);
const found = prepareCompaction(SessionManager.open(file).getBranch(), DEFAULT_COMPACTION_SETTINGS);
console.log(found.messagesToSummarize.length, found.turnPrefixMessages.length, found.tokensBefore);
