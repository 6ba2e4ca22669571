// The @anthropic-ai/sdk package for Node against a live server.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import Anthropic from '@anthropic-ai/sdk'

const client = new Anthropic({ baseURL: process.env.DSV4_URL, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'What is the capital of France?' }]
const quiet = {
  model: 'tiny', messages, temperature: 0, max_tokens: 40, thinking: { type: 'disabled' },
}

test('anthropic: message', async () => {
  const message = await client.messages.create(quiet)
  assert.match(message.content[0].text, /Paris/)
  assert.equal(message.stop_reason, 'end_turn')
})

test('anthropic: stream', async () => {
  const message = await client.messages.stream(quiet).finalMessage()
  assert.match(message.content[0].text, /Paris/)
})

test('anthropic: prefill', async () => {
  const begun = [...messages, { role: 'assistant', content: 'The capital of France is' }]
  const message = await client.messages.create({ ...quiet, messages: begun })
  assert.match(message.content[0].text, /Paris/)
})

test('anthropic: a tool that must be used', async () => {
  const input_schema = {
    type: 'object', properties: { unit: { enum: ['c', 'f'] } }, required: ['unit'],
  }
  const message = await client.messages.create({
    ...quiet, max_tokens: 100, tools: [{ name: 'weather', input_schema }],
    tool_choice: { type: 'tool', name: 'weather' },
  })
  const call = message.content.find((block) => block.type === 'tool_use')
  assert.ok(['c', 'f'].includes(call.input.unit))
})

test('anthropic: models', async () => {
  const models = await client.models.list()
  assert.equal(models.data[0].id, 'tiny')
})
